import gzip
import io
import json
import os
import tarfile

import numpy as np
import pytest
import soundfile
from lhotse import CutSet

from asr.audio.reading import SAMPLE_RATE, read_audio
from asr.corpus import input_kind, iterate, open_corpus, read_cut, write_cuts


def write(path, samples) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples, SAMPLE_RATE, format="NIST" if path.suffix == ".sph" else None, subtype="PCM_16")


def summary(cuts) -> dict[str, tuple[str, float]]:
    return {cut.id: (cut.supervisions[0].text, round(cut.duration, 2)) for cut in cuts}


def manifest(entries) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


def write_tar(path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def flac(samples) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, SAMPLE_RATE, format="FLAC")
    return buffer.getvalue()


def test_librispeechs_folders(tmp_path, tone):
    chapter = tmp_path / "LibriSpeech" / "train-clean-5" / "19" / "198"
    write(chapter / "19-198-0000.flac", tone(1.0))
    write(chapter / "19-198-0001.flac", tone(0.5))
    (chapter / "19-198.trans.txt").write_text("19-198-0000 HELLO WORLD\n19-198-0001 IT'S ME\n")
    for folder in (tmp_path / "LibriSpeech", tmp_path / "LibriSpeech" / "train-clean-5"):
        cuts = open_corpus(folder)
        assert summary(cuts) == {"19-198-0000": ("HELLO WORLD", 1.0), "19-198-0001": ("IT'S ME", 0.5)}
        assert {cut.supervisions[0].speaker for cut in cuts} == {"19"}


@pytest.mark.parametrize("suffix", ["sph", "wav"])
def test_an4s_folders(tmp_path, tone, caplog, suffix):
    (tmp_path / "an4" / "etc").mkdir(parents=True)
    write(tmp_path / "an4" / "wav" / "an4_clstk" / "fash" / f"an251-fash-b.{suffix}", tone(1.0))
    (tmp_path / "an4" / "etc" / "an4_train.fileids").write_text("an4_clstk/fash/an251-fash-b\nother\n")
    (tmp_path / "an4" / "etc" / "an4_train.transcription").write_text("<s> YES </s> (an251-fash-b)\nNO other\n")
    cuts = open_corpus(tmp_path / "an4" / "etc" / "an4_train.fileids")
    assert summary(cuts) == {"an251-fash-b": ("YES", 1.0)}
    assert next(iter(cuts)).supervisions[0].speaker == "fash"
    assert "left out other: an4_train.transcription has no line `TEXT (other)`" in caplog.text


def test_a_jsonl_manifest(tmp_path, tone):
    write(tmp_path / "clips" / "a.wav", tone(1.05))
    entries = [{"id": "a", "audio_filepath": "clips/a.wav", "text": "one", "duration": 1.0, "speaker": "s"}]
    (tmp_path / "m.jsonl").write_text(manifest(entries))
    cuts = open_corpus(tmp_path / "m.jsonl")
    assert summary(cuts) == {"a": ("one", 1.0)}
    assert np.abs(read_cut(cuts[0]) - tone(1.05)).max() < 1e-3  # a rounded duration loses no end


def test_provenance_beside_sound_is_no_text(tmp_path, tone):
    soundfile.write(tmp_path / "a.wav", tone(), SAMPLE_RATE)
    (tmp_path / "m.jsonl").write_text(json.dumps({"audio_filepath": "a.wav", "text": "one", "source": "librivox"}))
    (cut,) = open_corpus([tmp_path / "m.jsonl"])
    assert input_kind(cut) == "sound"


def test_texts_without_names_are_called_by_file_and_line(tmp_path, caplog):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(manifest({"source": source, "text": "one"} for source in ("un", " ")))
    assert [cut.id for cut in open_corpus([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])] == [
        "a.jsonl line 1",
        "b.jsonl line 1",
    ]
    assert "left out b.jsonl line 2" in caplog.text and "an empty source" in caplog.text


@pytest.mark.parametrize("here", ["", "./"])  # as `tar -cf m.tar .` names its members
def test_a_manifest_inside_a_tar_is_read_in_place(tmp_path, tone, here):
    text = manifest(
        [{"id": "a", "audio_filepath": "./a.flac", "text": "one"}, {"audio_filepath": "b.flac", "text": "two"}]
    )
    files = {"manifest.jsonl": text.encode(), "a.flac": flac(tone(1.0)), "b.flac": flac(tone(0.5, 880))}
    write_tar(tmp_path / "m.tar", {here + name: data for name, data in files.items()})
    cuts = open_corpus(tmp_path / "m.tar")
    assert summary(cuts) == {"a": ("one", 1.0), "b.flac": ("two", 0.5)}
    assert np.abs(read_cut(cuts["b.flac"]) - tone(0.5, 880)).max() < 1e-3


def test_several_utterances_of_one_file(tmp_path, tone):
    """As NeMo writes them: without an id, but with an offset."""
    write(tmp_path / "a.wav", tone(3.05))
    entries = [{"audio_filepath": "a.wav", "text": "one", "offset": float(i), "duration": 1.0} for i in range(3)]
    (tmp_path / "m.jsonl").write_text(manifest(entries))
    cuts = open_corpus(tmp_path / "m.jsonl")
    assert list(summary(cuts)) == ["a.wav-0.0", "a.wav-1.0", "a.wav-2.0"]
    assert [len(samples) for _, samples in iterate(cuts)] == 3 * [SAMPLE_RATE]


def test_the_header_of_a_file_is_read_once_for_all_of_its_utterances(tmp_path, tone, monkeypatch):
    write(tmp_path / "a.wav", tone(2.0))
    rows = [{"audio_filepath": "a.wav", "offset": i / 10, "duration": 0.1, "text": "one"} for i in range(20)]
    (tmp_path / "m.jsonl").write_text(manifest(rows))
    measured = []
    monkeypatch.setattr("asr.corpus.utterances.read_duration", lambda path: measured.append(path) or 2.0)
    assert len(open_corpus(tmp_path / "m.jsonl")) == 20 and len(measured) == 1


def test_lines_of_a_manifest_end_where_jsons_do(tmp_path, tone):
    entry = json.dumps({"id": "a", "audio_filepath": "a.wav", "text": "one\u2028two"}, ensure_ascii=False)
    write(tmp_path / "a.wav", tone(1.0))
    (tmp_path / "m.jsonl").write_text("\ufeff" + entry + "\n", encoding="utf-8")  # files start this way on Windows
    write_tar(tmp_path / "m.tar", {"manifest.jsonl": (entry + "\n").encode(), "a.wav": flac(tone(1.0))})
    for name in ("m.jsonl", "m.tar"):
        assert summary(open_corpus(tmp_path / name)) == {"a": ("one\u2028two", 1.0)}


def test_a_text_in_another_encoding_is_named(tmp_path, tone, caplog):
    for name in "ab":
        write(tmp_path / f"{name}.wav", tone(1.0))
        (tmp_path / f"{name}.txt").write_bytes("café".encode("latin-1" if name == "a" else "utf-8"))
    assert summary(open_corpus(tmp_path)) == {"b": ("café", 1.0)}  # one bad file among others is left out
    assert "a.txt, line 1: not text in UTF-8" in caplog.text
    (tmp_path / "m.jsonl").write_bytes('{"audio_filepath": "a.wav", "text": "café"}'.encode("latin-1"))
    (tmp_path / "an4").mkdir()
    (tmp_path / "an4" / "a.fileids").write_text("a\n")
    (tmp_path / "an4" / "a.transcription").write_bytes("CAFÉ (a)".encode("latin-1"))
    (tmp_path / "libri").mkdir()
    (tmp_path / "libri" / "1-2.trans.txt").write_bytes("1-2-0 CAFÉ".encode("latin-1"))
    for path, named in (("m.jsonl", "m.jsonl"), ("an4/a.fileids", "a.transcription"), ("libri", "1-2.trans.txt")):
        with pytest.raises(ValueError, match=rf"{named}, line 1: not text in UTF-8"):
            open_corpus(tmp_path / path)


def test_a_folder_with_a_text_beside_each_file(tmp_path, tone, caplog):
    write(tmp_path / "x" / "a.wav", tone(1.0))
    (tmp_path / "x" / "a.txt").write_text("hello\nthere\n")
    write(tmp_path / "untranscribed.wav", tone(1.0))
    assert summary(open_corpus(tmp_path)) == {"x/a": ("hello there", 1.0)}
    assert "left out untranscribed: no .txt with its transcript beside it" in caplog.text


def test_feature_matrices_are_a_corpus_too(tmp_path):
    np.save(tmp_path / "a.npy", np.ones((150, 7), np.float32))
    (tmp_path / "a.txt").write_text("one")
    cuts = open_corpus(tmp_path)
    assert summary(cuts) == {"a": ("one", 1.5)}
    assert read_cut(cuts[0]).shape == (150, 7)


def test_cuts_are_a_corpus_and_corpora_add_up(tmp_path, tone):
    write(tmp_path / "a" / "a.wav", tone(1.0))
    (tmp_path / "a" / "a.txt").write_text("one")
    write(tmp_path / "b" / "b.wav", tone(0.5))
    (tmp_path / "b" / "b.txt").write_text("two")
    open_corpus(tmp_path / "a").to_file(tmp_path / "a.jsonl.gz")
    cuts = open_corpus([tmp_path / "a.jsonl.gz", tmp_path / "b"])
    assert summary(cuts) == {"a": ("one", 1.0), "b": ("two", 0.5)}


def test_bad_files_are_named_counted_and_left_out(tmp_path, tone, caplog):
    write(tmp_path / "good.wav", tone(1.0))
    write(tmp_path / "hollow.wav", tone(0.0))
    (tmp_path / "empty.wav").write_bytes(b"")
    (tmp_path / "text.wav").write_bytes(b"not sound at all")
    names = ["good", "hollow", "empty", "text", "missing"]
    (tmp_path / "m.jsonl").write_text(manifest({"id": n, "audio_filepath": f"{n}.wav", "text": n} for n in names))
    assert summary(open_corpus(tmp_path / "m.jsonl")) == {"good": ("good", 1.0)}
    for name in names[1:]:
        assert f"left out {name}" in caplog.text
    assert "4 of 5 utterances left out" in caplog.text


def test_a_member_missing_from_a_tar_is_left_out(tmp_path, tone, caplog):
    text = manifest([{"audio_filepath": "a.flac", "text": "one"}, {"audio_filepath": "b.flac", "text": "two"}])
    write_tar(tmp_path / "m.tar", {"manifest.jsonl": text.encode(), "a.flac": flac(tone(1.0))})
    assert list(summary(open_corpus(tmp_path / "m.tar"))) == ["a.flac"]
    assert "left out b.flac" in caplog.text


def test_what_breaks_after_the_header_is_left_out_when_it_is_read(tmp_path, tone, caplog):
    write(tmp_path / "good.flac", tone(1.0))
    write(tmp_path / "torn.flac", np.random.default_rng(0).normal(0, 0.1, 80_000))
    data = (tmp_path / "torn.flac").read_bytes()
    (tmp_path / "torn.flac").write_bytes(data[: len(data) // 4])
    write(tmp_path / "whole.flac", tone(1.0))
    for name in ("good", "torn", "whole"):
        (tmp_path / f"{name}.txt").write_text(name)
    cuts = open_corpus(tmp_path)
    (tmp_path / "good.flac").rename(tmp_path / "moved.flac")
    assert [cut.id for cut, _ in iterate(cuts)] == ["whole"]
    assert "good.flac: no such file" in caplog.text and "torn.flac: " in caplog.text


def test_a_sound_that_ends_before_its_transcript_is_left_out(tmp_path, tone, caplog):
    write(tmp_path / "a.wav", tone(1.0))
    write(tmp_path / "b.wav", tone(10.0))
    entry = {"audio_filepath": "a.wav", "text": "one"}
    parts = {
        "whole": {},
        "rounded": {"duration": 1.05},
        "torn": {"duration": 4.0},
        "late": {"offset": 0.5, "duration": 2},
        "beyond": {"offset": 358.0},
        "later": {"offset": 0.8, "duration": 0.5},
        "long": {"audio_filepath": "b.wav", "duration": 10.4},
    }
    (tmp_path / "m.jsonl").write_text(manifest([{**entry, "id": name, **part} for name, part in parts.items()]))
    assert [cut.id for cut in open_corpus(tmp_path / "m.jsonl")] == ["whole", "rounded", "long"]
    assert "left out torn" in caplog.text and "1.00 s of the 4.00 s that it should have" in caplog.text
    assert "left out beyond" in caplog.text and "it is 1.00 s long, and the utterance begins at 358.00 s" in caplog.text
    (tmp_path / "m.jsonl").write_text(manifest([entry]))
    cuts = open_corpus(tmp_path / "m.jsonl")
    write(tmp_path / "a.wav", tone(0.3))  # as in a broken MP3 whose header counts what is missing
    assert list(iterate(cuts)) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.tar", "oops", "not an uncompressed tar"),
        ("m.jsonl.gz", "oops", r"m\.jsonl\.gz: cannot be read"),
        ("m.docx", "oops", "not a corpus"),
        ("m.jsonl.gz", gzip.compress(b"", mtime=0), "there are no cuts in it"),
        ("m.jsonl.gz", gzip.compress(b'{"audio_filepath": "a.wav"}', mtime=0), "a manifest is .jsonl, not compressed"),
    ],
)
def test_what_is_no_corpus_is_a_clear_error(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        open_corpus(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.flac", b"", r"no manifest\.jsonl in it"),
        ("manifest.jsonl", b'{"source": "un", "text": "one"}', "text to text belongs in a plain manifest"),
    ],
)
def test_a_tar_without_a_manifest_of_its_sound_is_a_clear_error(tmp_path, name, content, message):
    write_tar(tmp_path / "m.tar", {name: content})
    with pytest.raises(ValueError, match=rf"m\.tar: {message}"):
        open_corpus(tmp_path / "m.tar")


def test_nothing_there_is_a_clear_error(tmp_path):
    with pytest.raises(ValueError, match="no such file or folder"):
        open_corpus(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no audio file with a .txt"):
        open_corpus(tmp_path)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ('{"audio_filepath": "a.wav"}', "no text"),
        ('{"audio_filepath": "a.wav", "text": null}', "no text"),
        ("{oops", "not JSON"),
        ("[]", "not a JSON object"),
        ('{"audio_filepath": "a.wav", "text": "a", "duration": "long"}', "duration must be a number"),
        ('{"audio_filepath": "a.wav", "text": "a", "duration": true}', "duration must be a number"),
        ('{"audio_filepath": "a.wav", "text": "a", "duration": NaN}', "duration must be a number"),
        ('{"audio_filepath": "a.wav", "text": "a", "duration": 1e999}', "duration must be a number"),
        ('{"audio_filepath": "a.wav", "text": "a", "offset": -1}', "offset must be a number"),
    ],
)
def test_a_line_that_is_wrong_is_left_out_by_name_and_the_others_are_read(tmp_path, tone, caplog, line, fault):
    write(tmp_path / "a.wav", tone(1.0))
    good = json.dumps({"id": "a", "audio_filepath": "a.wav", "text": "one"})
    (tmp_path / "m.jsonl").write_text(f"{good}\n{line}\n\n")
    assert [cut.id for cut in open_corpus(tmp_path / "m.jsonl")] == ["a"]
    assert f"left out line 2: {fault}" in caplog.text and "1 of 2 utterances left out" in caplog.text


def test_a_manifest_may_have_fields_of_its_own(tmp_path, tone):
    write(tmp_path / "a.wav", tone(1.0))
    (tmp_path / "m.jsonl").write_text(manifest([{"id": "a", "audio_filepath": "a.wav", "text": "one", "fault": None}]))
    assert len(open_corpus(tmp_path / "m.jsonl")) == 1


def test_the_second_utterance_of_a_name_is_left_out(tmp_path, tone, caplog):
    write(tmp_path / "a.wav", tone(1.0))
    (tmp_path / "m.jsonl").write_text(manifest([{"id": "a", "audio_filepath": "a.wav", "text": "one"}] * 2))
    assert len(open_corpus(tmp_path / "m.jsonl")) == 1
    assert "left out a: another one has the same name" in caplog.text


def test_utterances_of_one_name_in_two_corpora_are_told_apart_and_a_corpus_may_be_given_twice(tmp_path, tone):
    for name in "ab":
        write(tmp_path / name / "1.wav", tone(1.0))
        (tmp_path / name / "1.txt").write_text(name)
    cuts = open_corpus([tmp_path / "a", tmp_path / "b", tmp_path / "a"])
    assert [(cut.id, cut.supervisions[0].text) for cut in cuts] == [("1", "a"), ("1@2", "b"), ("1@3", "a")]
    CutSet.from_cuts(cuts).to_file(tmp_path / "all.jsonl.gz")
    again = open_corpus([tmp_path / "all.jsonl.gz", tmp_path / "b"])
    assert [cut.id for cut in again] == ["1", "1@2", "1@3", "1@4"]


def test_parts_of_a_long_file_are_read_alone(tmp_path, tone, monkeypatch):
    """As in most corpora of talks, where each utterance is part of an hour."""
    rng, decoded, read = np.random.default_rng(0), [], soundfile.SoundFile.read

    def watched(self, frames, *rest, **settings):
        decoded.append(frames)
        return read(self, frames, *rest, **settings)

    for suffix in ("wav", "flac", "opus"):
        path = tmp_path / f"a.{suffix}"
        subtype = {"format": "OGG", "subtype": "OPUS"} if suffix == "opus" else {}
        soundfile.write(path, rng.normal(0, 0.1, 80 * SAMPLE_RATE), SAMPLE_RATE, **subtype)
        whole = read_audio(path)
        entries = [{"audio_filepath": path.name, "text": "x", "offset": at, "duration": 2.5} for at in (0, 31.7, 77.5)]
        (tmp_path / "m.jsonl").write_text(manifest(entries))
        for cut in open_corpus(tmp_path / "m.jsonl"):
            first = round(cut.start * SAMPLE_RATE)
            with monkeypatch.context() as patch:
                patch.setattr(soundfile.SoundFile, "read", watched)
                assert np.abs(read_cut(cut) - whole[first : first + 40_000]).max() < 1e-6
    assert decoded and max(decoded) <= 5 * SAMPLE_RATE


def test_a_name_may_be_the_number_zero(tmp_path, tone):
    write(tmp_path / "a.wav", tone(1.0))
    (tmp_path / "m.jsonl").write_text(manifest([{"id": 0, "audio_filepath": "a.wav", "text": "one"}]))
    assert open_corpus(tmp_path / "m.jsonl")[0].id == "0"


def test_a_matrix_with_a_name_that_is_not_utf8_is_left_out_of_what_is_written(tmp_path, caplog):
    for name in ("ok", os.fsdecode(b"caf\xe9")):
        np.save(tmp_path / f"{name}.npy", np.zeros((5, 4)))
    rows = [{"id": str(i), "audio_filepath": path.name, "text": "a"} for i, path in enumerate(tmp_path.glob("*.npy"))]
    (tmp_path / "m.jsonl").write_text(json.dumps(rows[0]) + "\n" + json.dumps(rows[1]) + "\n")
    write_cuts(open_corpus(tmp_path / "m.jsonl"), tmp_path / "cuts.jsonl.gz")
    assert len(open_corpus(tmp_path / "cuts.jsonl.gz")) == 1 and "not UTF-8" in caplog.text


def test_a_part_of_a_matrix_is_left_out(tmp_path, caplog):
    np.save(tmp_path / "a.npy", np.ones((100, 4), np.float32))
    entries = [{"audio_filepath": "a.npy", "text": "one"}, {"audio_filepath": "a.npy", "text": "two", "offset": 0.5}]
    (tmp_path / "m.jsonl").write_text(manifest(entries))
    assert [cut.supervisions[0].text for cut in open_corpus(tmp_path / "m.jsonl")] == ["one"]
    assert "a matrix is one utterance, and has no offset" in caplog.text


@pytest.mark.parametrize("broken", ["a\0.wav", "a\udce9.wav", "a\ud800.wav"], ids=["null", "escaped", "surrogate"])
def test_a_name_that_cannot_be_is_left_out(tmp_path, tone, caplog, broken):
    write(tmp_path / "a.wav", tone(1.0))
    entries = [{"audio_filepath": name, "text": "one"} for name in ("a.wav", broken)]
    (tmp_path / "m.jsonl").write_text(manifest(entries))
    assert len(open_corpus(tmp_path / "m.jsonl")) == 1
    assert "1 of 2 utterances left out" in caplog.text


def test_folders_that_are_linked_to_are_read_and_hidden_files_are_not(tmp_path, tone):
    for name in ("there/b", "here/a", "here/._a"):
        path = tmp_path / f"{name}.wav"
        path.parent.mkdir(exist_ok=True)
        write(path, tone(1.0))
        path.with_suffix(".txt").write_text("one")
    (tmp_path / "here" / "link").symlink_to(tmp_path / "there")
    (tmp_path / "there" / "back").symlink_to(tmp_path / "here")
    assert [cut.id for cut in open_corpus(tmp_path / "here")] == ["a", "link/b"]


@pytest.mark.parametrize("length", [{"duration": 1.0}, {}])  # without a duration, up to the end of the file
def test_an_offset_is_where_the_utterance_begins(tmp_path, tone, length):
    write(tmp_path / "a.wav", np.concatenate([tone(1.0, 300), tone(1.0, 900)]))
    entry = {"audio_filepath": "a.wav", "text": "second", "offset": 1.0, **length}
    (tmp_path / "m.jsonl").write_text(manifest([entry]))
    sound = read_cut(open_corpus(tmp_path / "m.jsonl")[0])
    assert len(sound) == SAMPLE_RATE
    assert np.abs(sound - tone(1.0, 900)).max() < 1e-3


def test_the_real_speech_opens(speech):
    cuts = open_corpus(speech / "an4.test.tar")
    assert len(cuts) == 130
    assert sum(cut.duration for cut in cuts) == pytest.approx(357, abs=2)
    assert read_cut(cuts[0]).std() > 0.001
