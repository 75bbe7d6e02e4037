"""`asr.align` in process: the words of a corpus get their times."""

import dataclasses
import os
import shutil

import numpy as np
import pytest
from lhotse import CutSet

from asr import align
from asr.audio.config import FeatureConfig
from asr.audio.reading import SAMPLE_RATE, read_audio, write_wav
from asr.corpus import open_corpus
from asr.decode.recognizer import Recognizer
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from asr.resources import resource
from asr.text.tokenizer import CharTokenizer
from tests.conftest import LETTERS

TEXT = "A man with a black dog was standing at the corner."


@pytest.fixture
def corpus(tmp_path):
    """A sample with its transcript, once as it is and once after a second of silence; a tenth of a second, too short
    for its transcript; a sample without a transcript; and one whose name is not UTF-8."""
    sample = read_audio(resource("data", "samples", "corner.flac"))
    silence = np.zeros(SAMPLE_RATE, np.float32)
    for name, sound in {
        "now": sample,
        "later": np.concatenate([silence, sample]),
        "short": sample[:1600],
        "untold": sample,
    }.items():
        write_wav(tmp_path / f"{name}.wav", sound)
        (tmp_path / f"{name}.txt").write_text(TEXT if name != "untold" else "?")
    for suffix in (".wav", ".txt"):
        shutil.copy(tmp_path / f"now{suffix}", tmp_path / os.fsdecode(b"caf\xe9" + suffix.encode()))
    return tmp_path


def test_every_word_has_its_time(corpus, capsys, caplog):
    align.main([str(corpus), "--out", str(corpus / "out" / "aligned.jsonl.gz"), "--ctm", str(corpus / "words.ctm")])
    assert "2 utterances, 22 words" in capsys.readouterr().out
    assert "short: silent, or too short for its transcript" in caplog.text and "untold: no transcript" in caplog.text
    cuts = {cut.id: cut for cut in CutSet.from_file(corpus / "out" / "aligned.jsonl.gz")}
    now, later = (cuts[name].supervisions[0].alignment["word"] for name in ("now", "later"))
    assert [word.symbol for word in now] == TEXT.lower().strip(".").split()
    assert now[4].start == pytest.approx(0.7, abs=0.2)  # "black"
    for a, b in zip(now, later, strict=True):
        assert b.start - a.start == pytest.approx(1.0, abs=0.15)
    lines = (corpus / "words.ctm").read_text().splitlines()
    assert len(lines) == 22  # in the corpus' order
    name, channel, start, duration, word = lines[4].split()
    assert (name, channel, word) == ("later", "1", "black") and 1.5 < float(start) < float(start) + float(
        duration
    ) < 2.5


def test_batches_do_not_change_the_times(corpus):
    for seconds in (1, 100):
        align.main([str(corpus), "--out", str(corpus / f"{seconds}.jsonl.gz"), "--batch-seconds", str(seconds)])
    one, all_ = (list(CutSet.from_file(corpus / f"{seconds}.jsonl.gz")) for seconds in (1, 100))
    for a, b in zip(one, all_, strict=True):
        assert a.supervisions[0].alignment == b.supervisions[0].alignment


def test_words_of_slow_matrices_lie_within_their_cuts(tmp_path, tiny_config, monkeypatch):
    """A frame of 40 ms counts as a hundredth of a second in its cut, and as four hundredths in a batch."""
    for i in range(4):
        np.save(tmp_path / f"{i}.npy", np.random.default_rng(i).normal(0, 1, (500, 80)).astype(np.float32))
        (tmp_path / f"{i}.txt").write_text("one two three")
    features = FeatureConfig(kind="matrix", dim=80, hop_ms=40, window_ms=40)
    SpeechModel(features, Transformer(tiny_config), CharTokenizer(LETTERS)).save(tmp_path / "model")
    batches, aligned = [], Recognizer.align
    monkeypatch.setattr(
        Recognizer, "align", lambda self, inputs, texts: batches.append(len(inputs)) or aligned(self, inputs, texts)
    )
    out = tmp_path / "aligned.jsonl.gz"
    align.main([str(tmp_path), "--out", str(out), "--model", str(tmp_path / "model"), "--batch-seconds", "40"])
    assert batches == [2, 2]
    for cut in CutSet.from_file(out):
        words = cut.supervisions[0].alignment["word"]
        assert cut.duration == 5.0 and 0 < words[-1].end <= cut.duration


def test_a_matrix_of_another_width_is_left_out_by_name(tmp_path, tiny_config, caplog):
    for name, width in (("fits", 80), ("narrow", 40)):
        np.save(tmp_path / f"{name}.npy", np.random.default_rng(0).normal(0, 1, (500, width)).astype(np.float32))
        (tmp_path / f"{name}.txt").write_text("one two three")
    features = FeatureConfig(kind="matrix", dim=80)
    SpeechModel(features, Transformer(tiny_config), CharTokenizer(LETTERS)).save(tmp_path / "model")
    align.main([str(tmp_path), "--out", str(tmp_path / "out.jsonl.gz"), "--model", str(tmp_path / "model")])
    assert "narrow: this model reads matrices (T, 80), not (500, 40)" in caplog.text
    assert [cut.id for cut in CutSet.from_file(tmp_path / "out.jsonl.gz")] == ["fits"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "attention"], "word times come from CTC"),
        (["--model", "nowhere"], "nowhere: not a model folder"),
        (["--device", "abacus"], "--device abacus"),
        (["--device", "vulkan"], "--device vulkan: this PyTorch does not compute on it"),
        (["--batch-seconds", "0"], "batch_seconds"),
        (["--ctm", "now.wav/words.ctm"], "now.wav"),
    ],
)
def test_what_cannot_be_aligned_is_one_line(corpus, tiny_config, monkeypatch, capsys, options, message):
    monkeypatch.chdir(corpus)
    transformer = Transformer(dataclasses.replace(tiny_config, ctc=False))
    SpeechModel(FeatureConfig(), transformer, CharTokenizer(LETTERS)).save(corpus / "attention")
    with pytest.raises(SystemExit, match="2"):
        align.main([str(corpus), "--out", "out.jsonl.gz", *options])
    error = capsys.readouterr().err
    assert error.startswith("asr.align: ") and message in error and error.count("\n") == 1


def test_utterances_that_ctm_would_call_alike_are_refused(corpus, monkeypatch, capsys):
    monkeypatch.chdir(corpus)
    cuts = list(open_corpus(corpus))
    monkeypatch.setattr("asr.corpus.open_corpus", lambda path: [cuts[0].with_id("a b"), cuts[1].with_id("a_b")])
    with pytest.raises(SystemExit, match="2"):
        align.main([str(corpus), "--out", "out.jsonl.gz", "--ctm", "out.ctm"])
    assert "--ctm: several utterances would be called a_b" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--out", "cuts.jsonl.gz"], ["--out", "a.jsonl.gz", "--ctm", "cuts.jsonl.gz"]])
def test_the_corpus_is_not_overwritten(tmp_path, monkeypatch, capsys, options):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        align.main([str(tmp_path / "cuts.jsonl.gz"), *options])
    assert "would overwrite what is read" in capsys.readouterr().err
