"""Lines of a manifest that nobody wrote on purpose."""

import json
import tarfile

import numpy as np
import pytest
import soundfile

from asr.audio.reading import SAMPLE_RATE
from asr.corpus import iterate, open_corpus
from asr.corpus.shards import write_shards
from tests.corpus.test_corpora import manifest, write


@pytest.fixture
def corpus(tmp_path, tone):
    """Writes a manifest of a good line and the given one, and returns the names of its utterances."""
    write(tmp_path / "a.wav", tone(1.0))

    def names(line: str) -> list[str]:
        good = manifest([{"audio_filepath": "a.wav", "text": "one"}])
        (tmp_path / "m.jsonl").write_text(f"{good.strip()}\n{line}\n")
        return [cut.id for cut in open_corpus(tmp_path / "m.jsonl")]

    return names


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (r'{"audio_filepath": "a.wav", "text": "bad \ud83d", "id": "b"}', "half a character in its text"),
        (r'{"audio_filepath": "a.wav", "text": "x", "speaker": "\ud83d"}', "half a character in its speaker"),
        ('{"audio_filepath": "a.wav", "text": 7}', "text is not a string"),
        ('{"audio_filepath": "a.wav", "text": "x", "offset": 1' + 400 * "0" + "}", "offset must be a number"),
        ('{"audio_filepath": "a.wav", "text": "x", "offset": 1' + 5000 * "0" + "}", "not JSON"),
        (100_000 * "[", "not JSON"),
        ('{"audio_filepath": "a.wav", "text": "x", "channel": -1}', "channel must be a whole number, 0 or more"),
        ('{"audio_filepath": "a.wav", "text": "x", "channel": true}', "channel must be a whole number, 0 or more"),
    ],
    ids=["text", "speaker", "number", "offset", "digits", "brackets", "negative", "boolean"],
)
def test_a_line_that_cannot_be_is_left_out_by_its_number(corpus, caplog, line, fault):
    assert corpus(line) == ["a.wav"]
    assert "line 2" in caplog.text and fault in caplog.text


@pytest.mark.parametrize("form", ["file", "tar", "shards"])
def test_an_utterance_may_be_one_channel_of_a_file(tmp_path, tone, form, caplog):
    """As in a call with a party on each side."""
    soundfile.write(tmp_path / "a.wav", np.stack([tone(1.0, 300), tone(1.0, 900)], axis=1), SAMPLE_RATE)
    entries = [{"audio_filepath": "a.wav", "text": "x", "channel": channel} for channel in (0, 1.0, None, 2)]
    path = tmp_path / "manifest.jsonl"
    path.write_text(manifest(entries))
    if form == "tar":
        path = tmp_path / "t.tar"
        with tarfile.open(path, "w") as tar:
            for name in ("manifest.jsonl", "a.wav"):
                tar.add(tmp_path / name, name)
    cuts = open_corpus(path)
    if form == "shards":
        cuts = write_shards(cuts, tmp_path / "shards", 10)
    heard = {cut.id: sound for cut, sound in iterate(cuts)}
    assert list(heard) == ["a.wav-channel0", "a.wav-channel1", "a.wav"]
    for sound, expected in zip(heard.values(), (tone(1.0, 300), tone(1.0, 900), None), strict=True):
        mean = (tone(1.0, 300) + tone(1.0, 900)) / 2
        np.testing.assert_allclose(sound, mean if expected is None else expected, atol=1e-3)
    assert "left out a.wav-channel2" in caplog.text and "its channels are 0 to 1, not 2" in caplog.text


def test_a_speaker_may_be_a_number(tmp_path, tone):
    write(tmp_path / "a.wav", tone(1.0))
    entries = [{"id": str(n), "audio_filepath": "a.wav", "text": "one", "speaker": n} for n in (0, 84, None)]
    (tmp_path / "m.jsonl").write_text(manifest(entries))
    assert [cut.supervisions[0].speaker for cut in open_corpus(tmp_path / "m.jsonl")] == ["0", "84", None]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("several", [True, False])
def test_one_list_or_object_is_no_manifest(tmp_path, indent, several):
    entry = {"audio_filepath": "a.wav", "text": "one"}
    (tmp_path / "m.json").write_text("\n " + json.dumps([entry] if several else entry, indent=indent))
    message = "a manifest has one JSON object on each line" if several or indent else "no utterance that can be read"
    with pytest.raises(ValueError, match=message):
        open_corpus(tmp_path / "m.json")


def test_a_channel_in_words_is_not_the_files(tmp_path, tone):
    write(tmp_path / "a.wav", tone(1.0))
    entries = [
        {"audio_filepath": "a.wav", "text": "one", "channel": "youtube"},
        {"source": "x", "text": "y", "channel": 3},
    ]
    (tmp_path / "m.jsonl").write_text(manifest(entries))
    assert [cut.id for cut in open_corpus(tmp_path / "m.jsonl")] == ["a.wav", "m.jsonl line 2"]


def test_what_stands_for_a_transcript_where_none_is_needed_is_ignored(tmp_path, tone):
    write(tmp_path / "a.wav", tone(1.0))
    (tmp_path / "m.jsonl").write_text(manifest([{"audio_filepath": "a.wav", "text": ["one"]}]))
    (cut,) = open_corpus(tmp_path / "m.jsonl", transcribed=False)
    assert cut.supervisions[0].text == ""


def test_half_a_character_of_a_text_to_read_is_left_out(tmp_path, caplog):
    (tmp_path / "m.jsonl").write_text('{"source": "ok", "text": "ok"}\n{"source": "\\ud83d", "text": "x"}\n')
    assert len(open_corpus(tmp_path / "m.jsonl")) == 1
    assert "half a character in its source" in caplog.text


def test_hard_links_in_a_tar_are_the_files_that_they_link_to(tmp_path, tone):
    write(tmp_path / "a.wav", tone(1.0))
    (tmp_path / "b.wav").hardlink_to(tmp_path / "a.wav")
    entries = [{"audio_filepath": f"{name}.wav", "text": "one"} for name in "ab"]
    (tmp_path / "manifest.jsonl").write_text(manifest(entries))
    with tarfile.open(tmp_path / "t.tar", "w") as tar:
        for name in ("manifest.jsonl", "a.wav", "b.wav"):
            tar.add(tmp_path / name, name)
        assert tar.getmember("b.wav").islnk()
    assert {cut.id: cut.duration for cut in open_corpus(tmp_path / "t.tar")} == {"a.wav": 1.0, "b.wav": 1.0}
