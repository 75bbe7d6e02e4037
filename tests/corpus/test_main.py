"""`python -m asr.corpus` as a user runs it."""

import os

import numpy as np
import pytest
import soundfile
from lhotse import CutSet
from lhotse.supervision import AlignmentItem

from asr.audio.reading import SAMPLE_RATE, read_audio
from asr.corpus import open_corpus, read_cut
from asr.corpus.__main__ import main
from tests.corpus.test_corpora import manifest, summary, write


def run(*arguments, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["asr.corpus", *map(str, arguments)])
    main()


def test_cuts_are_found_from_any_directory(tmp_path, tone, monkeypatch):
    write(tmp_path / "a.wav", tone(1.0))
    (tmp_path / "m.jsonl").write_text(manifest([{"audio_filepath": "a.wav", "text": "one"}]))
    monkeypatch.chdir(tmp_path)
    run("prepare", "m.jsonl", "--out", "cuts.jsonl.gz", monkeypatch=monkeypatch)
    monkeypatch.chdir("/")
    assert len(read_cut(open_corpus(tmp_path / "cuts.jsonl.gz")[0])) == SAMPLE_RATE


def test_what_has_a_name_that_is_not_utf_8_is_not_written(tmp_path, tone, monkeypatch, caplog, capsys):
    write(tmp_path / "a.wav", tone(1.0))
    (tmp_path / "a.txt").write_text("one")
    for suffix in (".wav", ".txt"):
        (tmp_path / os.fsdecode(b"caf\xe9" + suffix.encode())).write_bytes((tmp_path / f"a{suffix}").read_bytes())
    run("prepare", tmp_path, "--out", tmp_path / "cuts.jsonl.gz", monkeypatch=monkeypatch)
    assert [cut.id for cut in open_corpus(tmp_path / "cuts.jsonl.gz")] == ["a"]
    assert "1 of 2 utterances left out" in caplog.text and ": 1 utterances" in capsys.readouterr().out


def test_prepare_and_split_on_the_command_line(tmp_path, tone, monkeypatch, capsys):
    entries = []
    for speaker in "abcd":
        write(tmp_path / f"{speaker}.wav", tone(1.0))
        entries.append({"id": speaker, "audio_filepath": f"{speaker}.wav", "text": "one", "speaker": speaker})
    (tmp_path / "m.jsonl").write_text(manifest(entries))
    everything, dev, train = (tmp_path / f"{name}.jsonl.gz" for name in ("all", "dev", "train"))
    run("prepare", tmp_path / "m.jsonl", "--out", everything, "--wav", tmp_path / "wav", monkeypatch=monkeypatch)
    run("split", everything, "--speakers", 1, "--out", dev, "--rest", train, monkeypatch=monkeypatch)
    assert "4 utterances" in capsys.readouterr().out
    parts = [set(summary(open_corpus(path))) for path in (dev, train)]
    assert len(parts[0]) == 1 and parts[0] | parts[1] == set("abcd") and not parts[0] & parts[1]
    assert all("/wav/" in cut.recording.sources[0].source for cut in open_corpus(dev))
    with pytest.raises(SystemExit) as stopped:
        run("prepare", tmp_path / "nowhere", "--out", everything, monkeypatch=monkeypatch)
    assert stopped.value.code == 2


def test_a_sample_and_the_rest_are_the_whole_corpus(tmp_path, tone, monkeypatch, capsys):
    write(tmp_path / "a.wav", tone(1.0))
    (tmp_path / "m.jsonl").write_text(
        manifest({"id": name, "audio_filepath": "a.wav", "text": "one"} for name in "abcd")
    )
    some, others = tmp_path / "some.jsonl.gz", tmp_path / "others.jsonl.gz"

    def sample(utterances: int) -> None:
        options = ("--utterances", utterances, "--out", some, "--rest", others)
        run("sample", tmp_path / "m.jsonl", *options, monkeypatch=monkeypatch)

    with pytest.raises(SystemExit, match="2"):
        sample(4)
    assert "4 utterances; 4 leave no --rest" in capsys.readouterr().err and not some.exists()
    sample(3)
    parts = [[cut.id for cut in open_corpus(path)] for path in (some, others)]
    assert list(map(len, parts)) == [3, 1] and sorted(parts[0] + parts[1]) == list("abcd")


def test_utterances_of_nobody_known_are_no_speaker_to_be_split_off(tmp_path, tone, monkeypatch):
    write(tmp_path / "a.wav", tone(1.0))
    entries = [{"id": str(i), "audio_filepath": "a.wav", "text": "one", "speaker": "xy"[i:][:1]} for i in range(6)]
    (tmp_path / "m.jsonl").write_text(manifest(entries))
    dev, train = tmp_path / "dev.jsonl.gz", tmp_path / "train.jsonl.gz"
    for seed in range(5):
        options = ("--speakers", 1, "--seed", seed, "--out", dev, "--rest", train)
        run("split", tmp_path / "m.jsonl", *options, monkeypatch=monkeypatch)
        assert (len(open_corpus(dev)), len(open_corpus(train))) == (1, 5)


@pytest.mark.parametrize("command", ["prepare", "sample --utterances 1", "split --speakers 1 --rest x.jsonl.gz"])
def test_no_command_writes_over_its_corpus(tmp_path, tone, monkeypatch, capsys, command):
    write(tmp_path / "a.wav", tone(1.0))
    (tmp_path / "m.jsonl").write_text(manifest([{"audio_filepath": "a.wav", "text": "one"}]))
    monkeypatch.chdir(tmp_path)
    run("prepare", "m.jsonl", "--out", "cuts.jsonl.gz", monkeypatch=monkeypatch)
    content = (tmp_path / "cuts.jsonl.gz").read_bytes()
    with pytest.raises(SystemExit, match="2"):
        run(*command.split(), "cuts.jsonl.gz", "--out", tmp_path / "cuts.jsonl.gz", monkeypatch=monkeypatch)
    assert "would overwrite what is read" in capsys.readouterr().err
    assert (tmp_path / "cuts.jsonl.gz").read_bytes() == content


def test_decoded_sound_is_not_written_over_the_corpus(tmp_path, tone, monkeypatch, capsys):
    soundfile.write(tmp_path / "a.wav", tone(1.0), 44_100, subtype="PCM_24")
    (tmp_path / "a.txt").write_text("one")
    content = (tmp_path / "a.wav").read_bytes()
    with pytest.raises(SystemExit, match="2"):
        run("prepare", tmp_path, "--wav", tmp_path, "--out", tmp_path / "c.jsonl.gz", monkeypatch=monkeypatch)
    assert "a.wav is there already" in capsys.readouterr().err
    assert (tmp_path / "a.wav").read_bytes() == content


def test_decoded_sound_of_one_corpus_is_not_written_over_that_of_another(tmp_path, tone, monkeypatch, capsys):
    for corpus, hertz in (("one", 440), ("two", 880)):
        (tmp_path / corpus).mkdir()
        write(tmp_path / corpus / "a.wav", tone(1.0, hertz))
        (tmp_path / corpus / "a.txt").write_text(corpus)
    common = ("--wav", tmp_path / "wav", "--out")
    run("prepare", tmp_path / "one", *common, tmp_path / "1.jsonl.gz", monkeypatch=monkeypatch)
    with pytest.raises(SystemExit, match="2"):
        run("prepare", tmp_path / "two", *common, tmp_path / "2.jsonl.gz", monkeypatch=monkeypatch)
    assert "may belong to another corpus" in capsys.readouterr().err
    assert np.abs(read_audio(tmp_path / "wav" / "a.wav") - tone(1.0, 440)).max() < 1e-3

    entries = [{"id": name, "audio_filepath": "one/a.wav", "text": "one"} for name in ("/b", "b")]
    (tmp_path / "m.jsonl").write_text(manifest(entries))
    with pytest.raises(SystemExit, match="2"):
        run("prepare", tmp_path / "m.jsonl", *common, tmp_path / "3.jsonl.gz", monkeypatch=monkeypatch)
    assert "two utterances would be written to" in capsys.readouterr().err


def test_decoded_sound_stays_in_its_folder_whatever_utterances_are_called(tmp_path, tone, monkeypatch):
    """A manifest may name files outside its folder; utterances without an id are called by the name of their file."""
    (tmp_path / "lists").mkdir()
    write(tmp_path / "a.wav", tone(1.0))
    entries = [{"audio_filepath": "../a.wav", "text": "one"}]
    entries += [{"id": name, "audio_filepath": "../a.wav", "text": "one"} for name in ("/abs/a", "../../b/../c", "..")]
    (tmp_path / "lists" / "m.jsonl").write_text(manifest(entries))
    arguments = (tmp_path / "lists" / "m.jsonl", "--wav", tmp_path / "wav", "--out", tmp_path / "1.jsonl.gz")
    run("prepare", *arguments, monkeypatch=monkeypatch)
    inside = {str(path.relative_to(tmp_path / "wav")) for path in (tmp_path / "wav").rglob("*.wav")}
    assert inside == {"a.wav.wav", "abs/a.wav", "b/c.wav", "_.wav"}


def test_decoded_sound_keeps_what_is_known_of_it(tmp_path, tone, monkeypatch):
    write(tmp_path / "a.wav", tone(2.0))
    entry = {"audio_filepath": "a.wav", "text": "one", "speaker": "s", "offset": 0.5, "duration": 1.0}
    (tmp_path / "m.jsonl").write_text(manifest([entry]))
    cut = open_corpus(tmp_path / "m.jsonl")[0]
    cut.supervisions[0].language, cut.custom = "en", {"channel": "phone"}
    cut.supervisions[0].alignment = {"word": [AlignmentItem("one", 0.1, 0.2)]}
    CutSet.from_cuts([cut]).to_file(tmp_path / "cuts.jsonl.gz")
    arguments = ("prepare", tmp_path / "cuts.jsonl.gz", "--out", tmp_path / "new.jsonl.gz", "--wav", tmp_path / "wav")
    run(*arguments, monkeypatch=monkeypatch)
    (new,) = open_corpus(tmp_path / "new.jsonl.gz")
    assert "/wav/" in new.recording.sources[0].source and (new.start, new.duration) == (0.0, 1.0)
    assert new.supervisions[0].to_dict() == cut.supervisions[0].to_dict() and new.custom == cut.custom


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("sample --utterances 0", "--utterances must be at least 1, not 0"),
        ("split --speakers -1 --rest rest.jsonl.gz", "--speakers must be at least 1, not -1"),
        ("split --speakers 1 --rest new.jsonl.gz", "new.jsonl.gz would be written twice"),
    ],
)
def test_nothing_is_no_corpus(tmp_path, tone, monkeypatch, capsys, command, message):
    entries = []
    for speaker in "ab":
        write(tmp_path / f"{speaker}.wav", tone(1.0))
        entries.append({"audio_filepath": f"{speaker}.wav", "text": "one", "speaker": speaker})
    (tmp_path / "m.jsonl").write_text(manifest(entries))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        run(*command.split(), "m.jsonl", "--out", "new.jsonl.gz", monkeypatch=monkeypatch)
    assert message in capsys.readouterr().err and not (tmp_path / "new.jsonl.gz").exists()


@pytest.mark.parametrize("command", ["prepare", "splice"])
def test_what_was_interrupted_leaves_nothing_and_can_be_given_again(tmp_path, tone, monkeypatch, capsys, command):
    entries = []
    for name in "ab":
        write(tmp_path / f"{name}.wav", tone(1.0))
        entries.append({"id": name, "audio_filepath": f"{name}.wav", "text": "one", "speaker": "s"})
    (tmp_path / "m.jsonl").write_text(manifest(entries))
    given = (command, tmp_path / "m.jsonl", "--wav", tmp_path / "wav", "--out", tmp_path / "cuts.jsonl.gz")
    sound = ((cut, "one", tone(1.0)) for cut in open_corpus(tmp_path / "m.jsonl"))
    monkeypatch.setattr("asr.corpus.splicing.splice", lambda *args: sound)

    def interrupted(path, samples):
        if path.name.startswith("b"):
            raise KeyboardInterrupt
        write(path, samples)

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        patch.setattr("asr.corpus.__main__.write_wav", interrupted)
        run(*given, monkeypatch=monkeypatch)
    assert capsys.readouterr().err == "asr.corpus: interrupted\n"
    assert not list(tmp_path.glob("wav/*"))
    if command == "prepare":
        run(*given, monkeypatch=monkeypatch)
        assert len(open_corpus(tmp_path / "cuts.jsonl.gz")) == 2


@pytest.mark.parametrize("name", ["b\ud800", "b\0c"], ids=["surrogate", "null"])
def test_an_id_that_no_file_can_have_does_not_stop_the_others(tmp_path, tone, monkeypatch, caplog, name):
    write(tmp_path / "a.wav", tone(1.0))
    entries = [{"id": name, "audio_filepath": "a.wav", "text": "one"} for name in ("a", name)]
    (tmp_path / "m.jsonl").write_text(manifest(entries))
    run("shard", tmp_path / "m.jsonl", "--out", tmp_path / "shards", monkeypatch=monkeypatch)
    wav = ("--wav", tmp_path / "wav", "--out", tmp_path / "cuts.jsonl.gz")
    run("prepare", tmp_path / "m.jsonl", *wav, monkeypatch=monkeypatch)
    for corpus in ("shards", "cuts.jsonl.gz"):
        assert [cut.id for cut in open_corpus(tmp_path / corpus)] == ["a"]
    assert caplog.text.count("1 of 2 utterances left out") == 2
