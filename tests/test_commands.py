"""The commands as a user runs them: output, errors, exit codes."""

import dataclasses
import importlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
import torch

from asr import evaluate, transcribe
from asr.audio.config import FeatureConfig
from asr.commands import load_model, load_recognizer, progress_bar, say
from asr.decode.options import DecodeOptions
from asr.decode.tuning import save_tuning
from asr.model.language_model import LanguageModel, TextModel
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from asr.resources import resource
from asr.text.tokenizer import CharTokenizer
from tests.conftest import LETTERS, ROOT, sure_of_what_it_hears


def run(*arguments, python=sys.executable, **settings) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [python, "-m", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, env=environment, timeout=120, **settings)


def call(module: str, *arguments, cwd: Path | None = None) -> subprocess.CompletedProcess:
    """Like `run`, but in this process, which saves two seconds per call."""
    main = importlib.import_module("asr.corpus.__main__" if module == "asr.corpus" else module).main
    output, errors, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
        patch.setattr("sys.argv", [module, *map(str, arguments)])
        patch.chdir(cwd or Path.cwd())
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code or 0
    return subprocess.CompletedProcess(module, code, output.getvalue().encode(), errors.getvalue().encode())


def test_help_answers_at_once():
    took = []
    for _ in range(3):  # other tests run at the same time
        started = time.monotonic()
        assert b"FILE" in run("asr.transcribe", "--help").stdout
        took.append(time.monotonic() - started)
    assert min(took) < 0.3


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("shape '[2, 3]'")])
def test_what_fails_while_a_model_is_loaded_is_no_wrong_device(monkeypatch, error):
    def broken(*args, **settings):
        raise error

    monkeypatch.setattr("asr.decode.recognizer.Recognizer.load", broken)
    with pytest.raises(type(error)):
        load_model(None, "cpu")


@pytest.mark.parametrize(("typed", "named"), [("cuda:9", "^--device cuda:9: "), (None, "^(?!--device)")])
def test_a_gpu_that_cannot_be_used_is_one_line(monkeypatch, typed, named):
    monkeypatch.setattr("asr.decode.device.default_device", lambda: "cuda:9")
    with pytest.raises(ValueError, match=named):
        load_model(None, typed)


def test_importing_asr_loads_nothing_heavy():
    code = "import sys, asr; assert not {'torch', 'numpy', 'lhotse', 'lightning'} & set(sys.modules), sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_transcribing_loads_neither_lhotse_nor_lightning(files):
    code = (
        "import sys, asr; asr.load(sys.argv[1]).transcribe(sys.argv[2]); "
        "assert not {'lhotse', 'lightning', 'matplotlib', 'jiwer'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, files / "model", files / "a.wav"], check=True, cwd=ROOT)


def test_one_file_prints_its_text_and_several_their_names(files):
    one = call("asr.transcribe", "--model", files / "model", files / "a.wav")
    several = call("asr.transcribe", "--model", files / "model", files / "a.wav", files / "b.wav")
    assert one.returncode == several.returncode == 0
    lines = several.stdout.decode().splitlines()
    assert lines[0] == f"{files / 'a.wav'}: {one.stdout.decode().rstrip()}"
    assert lines[1].startswith(f"{files / 'b.wav'}: ")


def test_json_has_segments_and_the_n_best(files):
    done = call("asr.transcribe", "--model", files / "model", "--json", "--nbest", 2, files / "a.wav")
    description = json.loads(done.stdout)
    assert description["duration"] == 1.0
    assert [len(segment["nbest"]) for segment in description["segments"]] == [2]
    assert description["text"] == description["segments"][0]["text"]


def test_standard_input_is_a_file(files, programs):
    sure_of_what_it_hears(files / "model")
    piped = {"input": (files / "a.wav").read_bytes(), "python": programs / "python"}
    by_pipe = run("asr.transcribe", "--model", files / "model", "-", **piped)
    by_name = call("asr.transcribe", "--model", files / "model", files / "a.wav")
    assert by_pipe.stdout.strip() and by_pipe.stdout == by_name.stdout and by_pipe.returncode == 0


@pytest.mark.parametrize("terminal", [False, True])
def test_a_progress_bar_leaves_standard_output_alone_and_makes_room_on_a_terminal(monkeypatch, capsys, terminal):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.setenv("TERM", "xterm")
    with progress_bar(seconds=100.0) as progress:
        progress(50.0)
        print(said := "what was said" * 20)
    written = capsys.readouterr()
    assert written.out == ("" if terminal else f"{said}\n") and "of 100 s" in written.err
    assert (f"\r\033[2K{said}\n" in written.err) == terminal


def test_each_transcript_gets_a_file_of_its_own(files, capsys):
    out = files / "subtitles"
    (files / "bad.wav").write_bytes(b"")
    sounds = [str(files / f"{name}.wav") for name in ("a", "bad", "b")]
    with pytest.raises(SystemExit) as stopped:
        transcribe.main([*sounds, "--model", str(files / "model"), "--format", "vtt", "--out", str(out)])
    assert stopped.value.code == 1 and "bad.wav" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == ["a.vtt", "b.vtt"]
    assert (out / "a.vtt").read_text().startswith("WEBVTT\n")


def test_words_have_times_where_they_are_written(capsys):
    sample = str(resource("data", "samples", "corner.flac"))
    for form in ("ctm", "json"):
        with pytest.raises(SystemExit, match="0"):
            transcribe.main([sample, "--format", form])
    *lines, description = capsys.readouterr().out.splitlines()
    words = json.loads(description)["segments"][0]["words"]
    assert [line.split()[4] for line in lines] == [word["word"] for word in words] != []
    edges = [edge for word in words for edge in (word["start"], word["end"])]
    assert edges == sorted(edges) and edges[0] >= 0 and edges[-1] < 2.8
    assert words[4]["word"] == "black" and words[4]["start"] == pytest.approx(0.7, abs=0.2)


def test_without_ctc_subtitles_are_segments_and_words_have_no_times(files, tiny_config, capsys):
    transformer = Transformer(dataclasses.replace(tiny_config, ctc=False))
    SpeechModel(FeatureConfig(), transformer, CharTokenizer(LETTERS)).save(files / "attention")
    options = ["--model", str(files / "attention"), "--strategy", "greedy"]
    with pytest.raises(SystemExit, match="0"):
        transcribe.main([str(files / "a.wav"), *options, "--format", "srt"])
    assert "00:00:00,000 --> 00:00:01,000" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        transcribe.main([str(files / "a.wav"), *options, "--format", "ctm"])
    assert "--format ctm" in capsys.readouterr().err


def test_phrases_are_lines_of_a_file(files):
    (files / "names.txt").write_text("Cab Dab\n\nbad\n")
    command = ["asr.transcribe", files / "a.wav", "--model", files / "model", "--phrases"]
    assert call(*command, files / "names.txt", "--phrase-weight", 3).returncode == 0
    done = call(*command, files / "nowhere.txt")
    assert done.returncode == 2 and done.stderr.decode().endswith("nowhere.txt: no such file\n")
    done = call(*command, files / "names.txt", "--strategy", "ctc", "--beam-size", 1)
    assert done.returncode == 2 and b"phrases need a search" in done.stderr
    done = call(*command[:-1], "--phrase-weight", 3)
    assert done.returncode == 2 and b"--phrase-weight 3.0: there are no --phrases" in done.stderr


def test_a_reader_that_has_enough_ends_the_command_without_a_word(files):
    command = f"{sys.executable} -m asr.transcribe --model {files}/model {files}/a.wav {files}/b.wav | head -c 1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, env=environment, timeout=120)
    assert len(done.stdout) == 1 and done.stderr == b""


def test_a_name_that_is_not_utf_8_is_printed_all_the_same(files):
    name = os.fsdecode(os.fsencode(files) + b"/caf\xe9")
    try:
        for suffix in (".wav", ".txt"):
            shutil.copy(files / f"a{suffix}", name + suffix)
    except OSError:
        pytest.skip("here all names are UTF-8")
    model, printed = ("--model", files / "model"), "caf\N{REPLACEMENT CHARACTER}"
    done = call("asr.transcribe", name + ".wav", files / "a.wav", *model)
    assert done.returncode == 0 and f"{printed}.wav: " in done.stdout.decode()
    done = call("asr.transcribe", name + ".wav", *model, "--json", "--out", files / "out")
    assert done.returncode == 0 and len(list((files / "out").iterdir())) == 1
    assert call("asr.evaluate", files, *model, "--out", files / "heard.jsonl").returncode == 0
    heard = [json.loads(line)["id"] for line in (files / "heard.jsonl").read_text(encoding="utf-8").splitlines()]
    assert heard == ["a", "b", printed]


def test_another_model_that_was_tuned_to_have_no_weight_is_not_left_out_silently(files, tiny_model):
    save_tuning(files / "model", DecodeOptions(lm_weight=0.0))
    TextModel(LanguageModel(tiny_model.transformer.config), tiny_model.tokenizer).save(files / "lm")
    command = ["asr.evaluate", files, "--model", files / "model", "--lm", files / "lm"]
    done = call(*command)
    assert done.returncode == 2
    assert b"--lm would have no effect: lm-weight is 0, as tuned for the model; give --lm-weight" in done.stderr
    assert call(*command, "--lm-weight", "0.2").returncode == 0
    assert call("asr.tune", *command[1:], "--lm-weights", "0.1", "0.2").returncode == 0


def test_bad_files_get_one_line_each_and_the_others_their_text(files):
    (files / "empty.wav").write_bytes(b"")
    (files / "text.wav").write_text("no sound")
    bad = [files / "missing.wav", files / "empty.wav", files / "text.wav"]
    done = call("asr.transcribe", "--model", files / "model", files / "a.wav", *bad, files / "b.wav")
    assert done.returncode == 1
    assert len(done.stdout.splitlines()) == 2
    errors = done.stderr.decode().splitlines()
    assert len(errors) == 3
    for line, path in zip(errors, bad, strict=True):
        assert line.startswith(f"asr.transcribe: {path}: ")


def test_names_that_cannot_be_are_one_line_each(files, programs):
    (files / os.fsdecode(b"caf\xe9.wav")).write_bytes(b"")
    bad = ["x" * 300 + ".wav", os.fsdecode(os.fsencode(files) + b"/caf\xe9.wav")]
    options = ["--format", "json", "--model", files / "model"]
    done = run("asr.transcribe", *options, *bad, files / "a.wav", python=programs / "python")
    assert done.returncode == 1
    rows = [json.loads(line) for line in done.stdout.decode().splitlines()]
    assert len(rows) == 3 and rows[1]["error"].endswith("caf\ufffd.wav: the file is empty")
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--model", "nowhere"], "nowhere: not a model folder"),
        (["--model", __file__], "not a model folder (Not a directory)"),
        (["--strategy", "rescore", "--ctc-weight", "0"], "ctc_weight must be above 0"),
        (["--beam-size", "0"], "beam_size"),
        (["--ctc-weight", "7"], "ctc_weight"),
        (["--strategy", "viterbi"], "strategy"),
        (["--device", "abacus"], "--device abacus"),
        (["--batch-seconds", "0"], "batch_seconds"),
        (["--attention-window", "0"], "--attention-window must be at least 1"),
        (["--strategy", "greedy", "--nbest", "3"], "strategy greedy finds one hypothesis"),
        (["--strategy", "greedy", "--lm-weight", "0.3"], "--strategy greedy uses no other model"),
        (["--strategy", "greedy", "--beam-size", "20"], "--strategy greedy has one hypothesis"),
        (["--strategy", "greedy", "--length-bonus", "3"], "--strategy greedy has one hypothesis"),
        (
            ["--strategy", "ctc", "--beam-size", "1", "--lm-weight", "0.3"],
            "--strategy ctc with a beam of 1 uses no other",
        ),
        (["--strategy", "ctc", "--beam-size", "1", "--length-bonus", "3"], "takes the best path"),
        (["--strategy", "ctc", "--ilm-weight", "0.3"], "--strategy ctc does without the decoder"),
        (["--channel", "-1"], "channel counts from 0, and is -1"),
        (["--lm-weight", "0.3"], "--lm-weight 0.3: there is no language model (--lm)"),
        (["--ilm-weight", "0.3"], "--ilm-weight 0.3: there is no language model (--lm)"),
        (["--ngram-weight", "0.3"], "--ngram-weight 0.3: there is no n-gram model (--ngram)"),
    ],
)
def test_a_wrong_option_is_one_line_and_code_two(files, arguments, named):
    model = [] if arguments[0] == "--model" else ["--model", files / "model"]
    done = call("asr.transcribe", *model, *arguments, files / "a.wav")
    assert done.returncode == 2
    assert named in done.stderr.decode()
    assert len(done.stderr.splitlines()) == 1


def test_matrices_are_not_cut_into_pieces(files, tiny_model):
    SpeechModel(FeatureConfig(kind="matrix", dim=80), tiny_model.transformer, tiny_model.tokenizer).save(files / "wide")
    done = call("asr.transcribe", "--model", files / "wide", "--piece-seconds", "5", files / "a.npy")
    assert done.returncode == 2 and b"--piece-seconds is for sound, but this model takes matrix" in done.stderr


@pytest.mark.parametrize(("arguments", "loaded"), [([], True), (["--lm-weight", "0"], False)])
def test_a_language_model_without_weight_is_not_loaded(arguments, loaded):
    recognizer = load_recognizer(evaluate.parser().parse_args(["corpus", *arguments]))
    assert (recognizer.language_model is not None) == loaded


def test_the_recogniser_is_as_the_options_say(files):
    options = ["--batch-seconds", "7", "--piece-seconds", "5", "--attention-window", "3", "--length-bonus", "0.5"]
    recognizer = load_recognizer(evaluate.parser().parse_args(["corpus", "--model", str(files / "model"), *options]))
    assert (recognizer.batch_seconds, recognizer.piece_seconds, recognizer.options.length_bonus) == (7.0, 5.0, 0.5)
    assert recognizer.model.transformer.config.attention_window == (3, 3)


def test_commands_work_from_any_directory(files, programs):
    done = run("asr.transcribe", "--model", "model", "a.wav", cwd=files, python=programs / "python")
    assert done.returncode == 0


def test_a_folder_stands_for_the_sound_in_it(files):
    (files / "more").mkdir()
    (files / "a.wav").rename(files / "more" / "a.wav")
    lines = call("asr.transcribe", "--model", files / "model", files).stdout.decode().splitlines()
    assert [line.split(": ")[0] for line in lines] == [str(files / "b.wav"), str(files / "more" / "a.wav")]
    empty = call("asr.transcribe", "--model", files / "model", files / "model")
    assert empty.returncode == 2
    assert b"no sound in this folder" in empty.stderr


def test_a_folder_that_cannot_be_read_does_not_stop_the_others(files, monkeypatch):
    def walk(folder, onerror, **settings):
        yield str(folder), [], ["a.wav"]
        onerror(PermissionError(13, "Permission denied", f"{folder}/closed"))

    monkeypatch.setattr("asr.audio.reading.os.walk", walk)
    done = call("asr.transcribe", "--model", files / "model", files)
    assert done.returncode == 1 and done.stdout
    assert done.stderr.decode() == f"asr.transcribe: {files}/closed: Permission denied\n"


def test_recordings_that_ctm_would_call_alike_are_refused(files):
    for name in ("f a.wav", "f_a.wav"):
        shutil.copy(files / "a.wav", files / name)
    done = call("asr.transcribe", "--model", files / "model", files / "f a.wav", files / "f_a.wav", "--format", "ctm")
    assert done.returncode == 2 and b"several of the files would be called f_a" in done.stderr


@pytest.mark.parametrize(
    ("ends", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), 1, "out of memory"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), 1, "out of memory"),
    ],
)
def test_what_ends_a_command_from_outside_is_one_line(files, monkeypatch, ends, code, message):
    def broken(*args):
        raise ends

    monkeypatch.setattr("asr.decode.recognizer.Recognizer.recognize", broken)
    done = call("asr.transcribe", "--model", files / "model", files / "a.wav")
    assert done.returncode == code
    assert done.stderr.decode().startswith(f"asr.transcribe: {message}") and done.stderr.count(b"\n") == 1


def test_a_closed_standard_input_is_one_line(files, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    done = call("asr.transcribe", "--model", files / "model", "-")
    assert done.returncode == 1 and b"there is no standard input" in done.stderr


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_output_changes_nothing_else(files, monkeypatch, capsys, closed):
    monkeypatch.setattr(sys, closed, None)  # as `2>&-` does
    with pytest.raises(SystemExit, match="1"):
        transcribe.main([str(files / "a.wav"), "nowhere.wav", "--model", str(files / "model")])
    written = capsys.readouterr()
    assert ("a.wav: " in written.out, "nowhere.wav" in written.out) == (closed == "stderr", False)
    assert ("nowhere.wav: no such file" in written.err) == (closed == "stdout")


def test_what_cannot_be_written_is_found_before_any_work(files, tmp_path, monkeypatch):
    (tmp_path / "folder.jsonl.gz").mkdir()
    for command, flag in (("asr.evaluate", "--out"), ("asr.align", "--out"), ("asr.corpus", "--out")):
        words = ["prepare"] if command == "asr.corpus" else ["--model", tmp_path / "nowhere"]
        done = call(command, *words, files, flag, tmp_path / "folder.jsonl.gz")
        assert done.returncode == 2 and b"Is a directory" in done.stderr, done.stderr
    done = call("asr.align", files, "--out", tmp_path / "a.jsonl.gz", "--ctm", tmp_path / "a.jsonl.gz")
    assert done.returncode == 2 and b"would be written twice" in done.stderr
    assert not (tmp_path / "a.jsonl.gz").exists()


def test_a_terminal_without_a_character_shows_its_number(files, monkeypatch):
    shutil.copy(files / "a.wav", files / "世.wav")
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    done = run("asr.transcribe", "--model", files / "model", files / "世.wav", files / "b.wav")
    assert done.returncode == 0, done.stderr
    names = [line.split(b": ")[0] for line in done.stdout.splitlines()]
    assert names == [os.fsencode(files) + rb"/\u4e16.wav", os.fsencode(files / "b.wav")]


def test_json_is_json_on_a_terminal_without_its_characters_too(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    say(json.dumps({"text": "é 世 😀"}, ensure_ascii=False))
    assert json.loads(sys.stdout.buffer.getvalue()) == {"text": "é 世 😀"}


@pytest.mark.parametrize(
    "command",
    [
        "asr.transcribe a.wav --model model",
        "asr.evaluate . --model model",
        "asr.align . --model model --out x.jsonl.gz",
        "asr.inspect a.wav --model model --out x.html",
        "asr.tune . --model model",
        "asr.corpus prepare . --out x.jsonl.gz",
    ],
)
def test_a_full_disk_under_standard_output_is_one_line(files, programs, command):
    words = [programs / "python", "-m", *command.split()]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, cwd=files, timeout=60)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == b"asr: standard output: No space left on device"
    assert b"Traceback" not in done.stderr
