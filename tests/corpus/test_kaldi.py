"""Data directories of Kaldi and ESPnet."""

import numpy as np
import pytest
import soundfile

from asr.audio.reading import SAMPLE_RATE
from asr.corpus import iterate, open_corpus


@pytest.fixture
def data(tmp_path, tone):
    """Writes files of a `data/train` with two recordings, whose audio lies next to `data`."""
    (tmp_path / "downloads").mkdir()
    (tmp_path / "data" / "train").mkdir(parents=True)
    for name in "ab":
        soundfile.write(tmp_path / "downloads" / f"{name}.flac", tone(3.0), SAMPLE_RATE)

    def write(**files: str):
        for name, content in files.items():
            (tmp_path / "data" / "train" / name.replace("wav_scp", "wav.scp")).write_text(content)
        return tmp_path / "data" / "train"

    write(wav_scp="a downloads/a.flac\nb flac -c -d -s downloads/b.flac |\n")
    return write


def test_whole_recordings(data):
    cuts = list(open_corpus(data(text="b TWO WORDS\na ONE\n", utt2spk="a anna\nb bert\n")))
    assert [(cut.id, cut.supervisions[0].text, cut.supervisions[0].speaker, cut.duration) for cut in cuts] == [
        ("a", "ONE", "anna", 3.0),
        ("b", "TWO WORDS", "bert", 3.0),
    ]


def test_segments_of_recordings(data, tone):
    folder = data(text="a-1 ONE\na-2\tTWO\n", segments="a-1 a 0.50 1.25\na-2 a 1.25 -1\n")
    (first, heard), (second, rest) = iterate(open_corpus(folder))
    assert (first.id, first.start, first.duration, first.supervisions[0].speaker) == ("a-1", 0.5, 0.75, None)
    np.testing.assert_allclose(heard, tone(3.0)[SAMPLE_RATE // 2 :][: len(heard)], atol=1e-4)
    assert len(heard) == 0.75 * SAMPLE_RATE
    assert (second.supervisions[0].text, second.duration, len(rest)) == ("TWO", 1.75, 1.75 * SAMPLE_RATE)


def test_what_cannot_be_used_is_left_out_by_name(data, caplog):
    folder = data(
        wav_scp="a downloads/a.flac\nb sox downloads/b.flac -t wav - remix 2 |\nc nowhere.wav\nd downloads/a.flac\n",
        text="a ONE\nb TWO\nc THREE\n",
    )
    assert [cut.id for cut in open_corpus(folder)] == ["a"]
    assert "left out b: its sound is made by a command, 'sox downloads/b.flac -t wav - remix 2 |'" in caplog.text
    assert "left out c: nowhere.wav: no such file" in caplog.text and "left out d: no text" in caplog.text


def test_a_long_command_and_a_segment_of_no_length_lose_nothing_else(data, caplog):
    folder = data(
        wav_scp=f"a downloads/a.flac\nb wav-reverberate {'x' * 300} downloads/b.flac |\nc flac -cd --skip=1 a.flac |\n",
        text="a-1 ONE\na-2 TWO\na-3 THREE\na-4 SIX\nb-1 FOUR\nc-1 FIVE\n",
        segments="a-1 a 0 1\na-2 a 2 2\na-3 a 1 nan\na-4 a -5 -1\nb-1 b 0 1\nc-1 c 0 1\n",
    )
    assert [cut.id for cut in open_corpus(folder)] == ["a-1"]
    assert "left out a-2: it begins at 2.0 and ends at 2.0" in caplog.text and "left out a-3: it begins" in caplog.text
    assert "left out b-1: its sound is made by a command" in caplog.text
    assert "left out c-1: its sound is made by a command" in caplog.text


def test_text_is_needed_but_for_sound_alone(data):
    folder = data()
    assert len(open_corpus(folder, transcribed=False)) == 2
    with pytest.raises(ValueError, match="text: no such file"):
        open_corpus(folder)


@pytest.mark.parametrize("line", ["a-1 a 0.5", "a-1 a zero one", "a-1"])
def test_a_segment_that_is_none_loses_nothing_else(data, line, caplog):
    folder = data(text="a-1 ONE\na-2 TWO\n", segments=f"{line}\na-2 a 0 1\n")
    assert [cut.id for cut in open_corpus(folder)] == ["a-2"]
    assert "left out a-1: its line of segments, '" in caplog.text and "is not RECORDING BEGIN END" in caplog.text


@pytest.mark.parametrize(("files", "where"), [({"segments": "a a 0 1\n"}, "segments"), ({}, "wav.scp")])
def test_a_text_without_sound_is_named(data, caplog, files, where):
    assert [cut.id for cut in open_corpus(data(text="a ONE\nz TWO\n", **files))] == ["a"]
    assert f"left out z: {where} has no audio of it" in caplog.text


def test_a_segment_of_no_recording_is_left_out(data, caplog):
    folder = data(text="a-1 ONE\nx-1 TWO\n", segments="a-1 a 0 1\nx-1 x 0 1\n")
    assert [cut.id for cut in open_corpus(folder)] == ["a-1"]
    assert "left out x-1: wav.scp has no file of x" in caplog.text


@pytest.mark.parametrize("segments", ["a a 0 1\na a 1 2\n", ""])
def test_a_name_that_is_there_twice_is_reported(data, caplog, segments):
    folder = data(wav_scp="a downloads/a.flac\na downloads/b.flac\nb\n", text="a ONE\nb TWO\n", segments=segments)
    assert [cut.id for cut in open_corpus(folder)] == ["a"]
    assert "left out a: another one has the same name" in caplog.text
    assert segments or "left out b: wav.scp has no file of b" in caplog.text


def test_a_segment_without_an_end_is_left_out(data, caplog):
    cuts = open_corpus(data(text="u1 ONE\nu2 TWO\n", segments="u1 a 0 inf\nu2 a 0 0.5\n"))
    assert [cut.id for cut in cuts] == ["u2"] and "u1" in caplog.text
