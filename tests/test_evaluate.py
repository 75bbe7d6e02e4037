"""`asr.evaluate` as a user runs it."""

import json
import re

import numpy as np
import soundfile

from asr.audio.reading import SAMPLE_RATE
from asr.corpus import open_corpus
from tests.conftest import sure_of_what_it_hears
from tests.test_commands import call, run


def test_processes_share_a_corpus_and_the_first_has_all_of_it_in_order(files, programs):
    for i in range(3):  # five utterances of different lengths, for two processes
        soundfile.write(files / f"c{i}.wav", np.random.default_rng(i).normal(0, 0.1, 4000 * (5 - i)), SAMPLE_RATE)
        (files / f"c{i}.txt").write_text("three four")
    sure_of_what_it_hears(files / "model")
    options = [files, "--model", files / "model", "--precision", "float32", "--beam-size", 2, "--json", "--out"]
    alone = call("asr.evaluate", *options, files / "alone.jsonl")
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", 2, "--no-python", programs / "python"]
    together = run(*launch, "-m", "asr.evaluate", *options, files / "together.jsonl")
    assert together.returncode == 0, together.stderr.decode()
    figures = [json.loads(done.stdout.decode().splitlines()[-1]) for done in (alone, together)]
    assert figures[0]["words"] == figures[1]["words"] and figures[1]["utterances"] == 5
    rows = [
        [json.loads(line) for line in (files / f"{name}.jsonl").read_text().splitlines()]
        for name in ("alone", "together")
    ]
    assert [(row["id"], row["hypothesis"]) for row in rows[0]] == [(row["id"], row["hypothesis"]) for row in rows[1]]


def test_evaluate_scores_a_corpus(files):
    out = files / "heard.jsonl"
    done = call("asr.evaluate", "--model", files / "model", "--out", out, files)
    assert done.returncode == 0, done.stderr
    first, second, third, last = done.stdout.decode().splitlines()
    assert re.match(r"WER \d+\.\d\d %, \d+\.\d to \d+\.\d \(.* in 4 words\)", first)
    assert second.startswith("CER ") and "in 14 characters" in second
    assert third.startswith("SER 100.00 %")
    assert last.startswith("2 utterances, 2 s")
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["a", "b"]


def test_several_corpora_are_scored_each_and_together(files):
    other = files / "other"
    other.mkdir()
    soundfile.write(other / "a.wav", np.random.default_rng(0).normal(0, 0.1, 8000), SAMPLE_RATE)
    (other / "a.txt").write_text("three four five")
    done = call("asr.evaluate", "--model", files / "model", files, other)
    assert done.returncode == 0, done.stderr
    each, alone, whole, *_ = done.stdout.decode().splitlines()
    assert re.match(rf"{files}: WER .* in 7 words\)", each) and re.match(rf"{other}: WER .* in 3 words\)", alone)
    assert re.match(r"WER .* in 10 words\)", whole)
    figures = json.loads(call("asr.evaluate", "--model", files / "model", "--json", files, other).stdout)
    assert [(part["corpus"], part["total"]) for part in figures["corpora"]] == [(str(files), 7), (str(other), 3)]
    assert sum(part["deletions"] for part in figures["corpora"]) == figures["words"]["deletions"]
    twice = json.loads(call("asr.evaluate", "--model", files / "model", "--json", other, other).stdout)
    assert [part["total"] for part in twice["corpora"]] == [3, 3] and twice["words"]["total"] == 6


def test_both_sides_can_be_normalised_otherwise_and_what_cannot_be_read_is_counted(files, caplog):
    (files / "c.wav").write_bytes(b"")
    entries = [{"audio_filepath": f"{name}.wav", "text": "Über ONE"} for name in "abc"]
    (files / "m.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    cuts = files / "cuts.jsonl.gz"
    assert call("asr.corpus", "prepare", files / "m.jsonl", "--out", cuts).returncode == 0
    (files / "b.wav").unlink()
    common = (cuts, "--model", files / "model", "--json", "--out", files / "heard.jsonl")
    said = {}
    for normalizer in (None, "none"):
        done = call("asr.evaluate", *common, *(["--normalizer", normalizer] if normalizer else []))
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["left_out"] == 1
        said[normalizer] = json.loads((files / "heard.jsonl").read_text().splitlines()[0])["reference"]
    assert said == {None: "uber one", "none": "Über ONE"}
    both = call("asr.evaluate", files / "m.jsonl", *common)
    assert "m.jsonl: 2 of 3 utterances left out" in caplog.text
    assert json.loads(both.stdout)["left_out"] == 3  # two as the manifest is opened, one as the cuts are read
    done = call("asr.evaluate", *common, "--normalizer", "klingon")
    assert done.returncode == 2 and b"normalizer: 'klingon' is not one of english" in done.stderr


def test_evaluate_does_not_overwrite_its_corpus(files):
    manifest = '{"audio_filepath": "a.wav", "text": "one two"}\n'
    (files / "m.jsonl").write_text(manifest)
    done = call("asr.evaluate", "--model", files / "model", "m.jsonl", "--out", files / "m.jsonl", cwd=files)
    assert done.returncode == 2 and done.stderr.strip().endswith(b"m.jsonl would overwrite what is read")
    assert (files / "m.jsonl").read_text() == manifest
    done = call("asr.evaluate", "--model", "nowhere", "m.jsonl", "--out", files, cwd=files)
    assert done.returncode == 2 and b"Is a directory" in done.stderr  # before the model is loaded


def test_evaluate_says_what_is_no_corpus(files):
    done = call("asr.evaluate", "--model", files / "model", files / "nowhere")
    assert done.returncode == 2
    assert done.stderr.decode().strip() == f"asr.evaluate: {files / 'nowhere'}: no such file or folder"


def test_a_corpus_without_transcripts_has_no_error_rate(files, tmp_path):
    (tmp_path / "silent.jsonl").write_text(json.dumps({"audio_filepath": str(files / "a.wav"), "text": "..."}))
    done = call("asr.evaluate", tmp_path / "silent.jsonl", "--model", files / "model")
    assert done.returncode == 2
    assert done.stderr == b"asr.evaluate: no utterance has a transcript to compare with\n"
    two = [
        {"audio_filepath": str(files / "a.wav"), "text": "..."},
        {"audio_filepath": str(files / "b.wav"), "text": "a"},
    ]
    (tmp_path / "two.jsonl").write_text("\n".join(map(json.dumps, two)))
    open_corpus(tmp_path / "two.jsonl").to_file(tmp_path / "two.jsonl.gz")
    (files / "b.wav").unlink()
    done = call("asr.evaluate", tmp_path / "two.jsonl.gz", "--model", files / "model")
    assert done.returncode == 2
    assert done.stderr.endswith(b"asr.evaluate: no utterance with a transcript could be read\n")
