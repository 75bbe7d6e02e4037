"""Where `asr.transcribe` writes its transcripts."""

import errno
import io
import os
import shutil
from pathlib import Path

import pytest

from asr import transcribe, tune
from asr.decode.options import DecodeOptions
from asr.decode.tuning import save_tuning
from asr.model.language_model import LanguageModel, TextModel
from tests.test_commands import call


def test_a_transcript_does_not_overwrite_another(files, capsys):
    (files / "other").mkdir()
    shutil.copy(files / "a.wav", files / "other" / "a.wav")
    sounds = [str(files / "a.wav"), str(files / "other" / "a.wav")]
    ways = (
        (["--out", str(files / "out")], "a.txt"),
        (["--format", "srt"], "--out DIR"),
        (["--format", "ctm"], "called a"),
    )
    for options, named in ways:
        with pytest.raises(SystemExit, match="2"):
            transcribe.main([*sounds, "--model", str(files / "model"), *options])
        assert named in capsys.readouterr().err
    assert not (files / "out").exists()
    with pytest.raises(SystemExit, match="2"):  # a.txt is the reference
        transcribe.main([sounds[0], "--model", str(files / "model"), "--out", str(files)])
    assert "a.txt exists already" in capsys.readouterr().err and (files / "a.txt").read_text() == "one two"


def test_the_transcripts_of_a_folder_lie_as_its_files_do_and_an_interrupted_run_goes_on(files):
    for day in ("mon", "tue"):
        (files / "calls" / day).mkdir(parents=True)
        shutil.copy(files / "a.wav", files / "calls" / day / "1.wav")
    command = ["asr.transcribe", files / "calls", files / "b.wav", "--model", files / "model", "--out", files / "out"]
    assert call(*command).returncode == 0
    written = sorted(str(path.relative_to(files / "out")) for path in (files / "out").rglob("*.txt"))
    assert written == ["b.txt", "mon/1.txt", "tue/1.txt"]
    (files / "out" / "mon" / "1.txt").write_text("kept")
    (files / "out" / "b.txt").unlink()
    assert b"--skip-existing continues" in call(*command).stderr
    assert call(*command, "--skip-existing").returncode == 0
    assert (files / "out" / "mon" / "1.txt").read_text() == "kept" and (files / "out" / "b.txt").exists()
    assert {path.name for path in (files / "out").rglob("*") if path.is_file()} == {"1.txt", "b.txt"}


def test_no_transcript_takes_the_place_of_another(files):
    for name in (".a.wav", "a.part.wav"):
        shutil.copy(files / "a.wav", files / name)
    rest = ("--model", files / "model", "--out", files / "out")
    assert call("asr.transcribe", files / ".a.wav", files / "a.wav", *rest).returncode == 0
    assert {path.name for path in (files / "out").iterdir()} == {".a.txt", "a.txt"}
    done = call("asr.transcribe", files / "a.part.wav", files / "a.wav", *rest[:-1], files / "other")
    assert done.returncode == 2 and b"a.part.txt" in done.stderr


def test_what_could_not_be_read_to_its_end_is_not_done(files):
    whole = (files / "a.wav").read_bytes()
    (files / "a.wav").write_bytes(whole[: -len(whole) // 4])
    (files / "b.wav").write_bytes(b"")
    command = ["asr.transcribe", files / "a.wav", files / "b.wav", "--model", files / "model", "--out", files / "out"]
    assert call(*command).returncode == 1
    assert [path.name for path in (files / "out").iterdir()] == ["a.part.txt"]
    (files / "out" / "a.part.txt").write_text("corrected by hand")
    refused = call(*command)
    assert refused.returncode == 2 and b"a.part.txt exists already" in refused.stderr
    assert (files / "out" / "a.part.txt").read_text() == "corrected by hand"
    for name in "ab":
        (files / f"{name}.wav").write_bytes(whole)
    assert call(*command, "--skip-existing").returncode == 0
    assert {path.name for path in (files / "out").iterdir()} == {"a.part.txt", "a.txt", "b.txt"}
    assert call(*command[:-2], "--skip-existing").returncode == 2


def test_what_is_to_come_is_known_without_reading_standard_input(files, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO((files / "a.wav").read_bytes())))
    known = [str(files / name) for name in ("a.wav", "b.wav", "nowhere.wav", "a.txt")]
    assert transcribe._seconds([*known, "-"]) == 2.0


def test_a_transcript_that_cannot_be_written_is_one_line(files, monkeypatch):
    def full(path, mode="r", *rest, **settings):
        if mode == "w" and path.parent.name == "out":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, mode, *rest, **settings)

    opened = Path.open
    monkeypatch.setattr(Path, "open", full)
    done = call("asr.transcribe", files / "a.wav", "--model", files / "model", "--out", files / "out")
    assert (
        done.returncode == 2 and done.stderr.decode() == "asr.transcribe: --out: [Errno 28] No space left on device\n"
    )


def test_a_folder_that_may_not_be_entered_and_names_that_are_too_long_are_found_before_any_work(files, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    long = files / f"{'x' * 251}.wav"
    shutil.copy(files / "a.wav", long)
    command = ["asr.transcribe", "--model", files / "model", "--json", "--out", files / "out", files / "a.wav"]
    done = call(*command, long)
    assert done.returncode == 2 and b"File name too long" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not any((files / "out").iterdir())
    monkeypatch.setattr(Path, "exists", refused)
    done = call(*command)
    assert done.returncode == 2 and done.stderr == b"asr.transcribe: --out: [Errno 13] Permission denied\n"


def test_a_file_is_no_folder_for_transcripts(files, capsys):
    with pytest.raises(SystemExit, match="2"):
        transcribe.main([str(files / "a.wav"), "--model", str(files / "model"), "--out", str(files / "b.wav")])
    assert f"--out: {files / 'b.wav'} is a file, and transcripts go into a folder\n" in capsys.readouterr().err


def test_options_without_effect_are_refused(files, tiny_model, capsys):
    lm, phrases = ["--lm", str(files / "lm")], files / "phrases.txt"
    TextModel(LanguageModel(tiny_model.transformer.config), tiny_model.tokenizer).save(files / "lm")
    phrases.write_text("\n \n")

    def refused(*options: str) -> str:
        with pytest.raises(SystemExit, match="2"):
            transcribe.main([str(files / "a.wav"), "--model", str(files / "model"), *options])
        return capsys.readouterr().err

    assert "--nbest is for --format json: text shows one hypothesis" in refused("--nbest", "3")
    assert f"--phrases {phrases}: there are none in it" in refused("--phrases", str(phrases))
    assert "--strategy greedy is by attention alone" in refused("--strategy", "greedy", "--ctc-weight", "0.4")
    assert "--lm would have no effect: --lm-weight is 0\n" in refused(*lm, "--lm-weight", "0")
    save_tuning(files / "model", DecodeOptions(lm_weight=0.0), language_model=files / "lm")
    untold = "lm-weight is 0, as tuned for the model; give --lm-weight"
    assert f"--ilm-weight would have no effect: {untold}\n" in refused("--ilm-weight", "0.2")
    with pytest.raises(SystemExit, match="2"):
        tune.main([str(files), "--model", str(files / "model"), "--ilm-weights", "0.2", "0.3"])
    assert f"--ilm-weights would have no effect: {untold}\n" in capsys.readouterr().err
    save_tuning(files / "model", DecodeOptions(lm_weight=0.3))
    with pytest.raises(SystemExit, match="2"):
        tune.main([str(files), "--model", str(files / "model"), *lm, "--lm-weights", "0"])
    assert "--lm would have no effect: --lm-weights are 0\n" in capsys.readouterr().err
