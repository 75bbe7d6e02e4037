"""`asr.tune` as a user runs it."""

import dataclasses
import json
import types

import pytest

from asr.audio.config import FeatureConfig
from asr.decode.confidence import word_confidences
from asr.decode.options import DecodeOptions
from asr.decode.transcript import Segment, Transcript, Word
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from asr.text.tokenizer import CharTokenizer
from asr.tune import best_options, calibrate
from tests.conftest import LETTERS
from tests.test_commands import call


def test_tuning_writes_what_the_other_commands_then_do(files):
    options = ["--model", files / "model", "--ctc-weights", 0.3, 1.0, "--beam-size", 2, "--write"]
    options += ["--lm-weights", 0, "--ilm-weights", 0]  # weights of 0 need no language model
    (files / "names.txt").write_text("bad\n")
    options += ["--phrases", files / "names.txt"]  # for this dev set only: not saved
    options += ["--piece-seconds", 4]
    done = call("asr.tune", files, *options)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.decode().splitlines()
    assert lines[0] == "| ctc_weight | lm_weight | ilm_weight | ngram_weight | length_bonus | WER % | seconds |"
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| 0.3", "| 1"]
    assert "expected calibration error" in lines[4]
    assert json.loads((files / "model" / "decoding.json").read_text())["options"]["beam_size"] == 2
    assert json.loads((files / "model" / "decoding.json").read_text())["options"]["phrases"] == []
    assert call("asr.tune", files, "--model", files / "model", "--write").returncode == 0
    assert json.loads((files / "model" / "decoding.json").read_text())["piece_seconds"] == 4
    assert call("asr.transcribe", "--model", files / "model", files / "a.wav").returncode == 0


def test_without_the_language_model_all_weights_of_the_internal_one_are_one_row(monkeypatch, capsys):
    scored = types.SimpleNamespace(references=["a"], hypotheses=["a"], seconds=1.0)
    monkeypatch.setattr("asr.decode.corpora.transcribe_cuts", lambda recognizer, cuts: scored)
    model = types.SimpleNamespace(transformer=types.SimpleNamespace(ctc=True, bigram=True))
    recognizer = types.SimpleNamespace(options=DecodeOptions(nbest=3), model=model, language_model=None)
    best, heard = best_options(recognizer, None, {"lm_weight": [0.0, 0.3], "ilm_weight": [0.0, 0.2, 0.4]})
    rows = [line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [["| 0", "0"], ["| 0.3", "0"], ["| 0.3", "0.2"], ["| 0.3", "0.4"]]
    assert best.nbest == 1 and heard is scored  # nbest is not a property of the model


def test_the_lowest_error_rate_is_chosen_the_first_of_several(monkeypatch):
    heard = {0.1: "a b", 0.2: "a c", 0.3: "a c", 0.4: "b"}

    def transcribed(recognizer, cuts):
        said = heard[recognizer.options.ctc_weight]
        return types.SimpleNamespace(references=["a c"], hypotheses=[said], seconds=1.0)

    monkeypatch.setattr("asr.decode.corpora.transcribe_cuts", transcribed)
    model = types.SimpleNamespace(transformer=types.SimpleNamespace(ctc=True))
    recognizer = types.SimpleNamespace(options=DecodeOptions(), model=model, language_model=None)
    best, scored = best_options(recognizer, None, {"ctc_weight": list(heard)})
    assert best.ctc_weight == 0.2 and scored.hypotheses == ["a c"]


def test_what_the_model_has_not_or_cannot_be_written_is_said_before_any_work(files, tiny_config, monkeypatch):
    monkeypatch.setattr("asr.decode.corpora.transcribe_cuts", lambda *args: pytest.fail("it was decoded"))
    SpeechModel(FeatureConfig(), Transformer(dataclasses.replace(tiny_config, ctc=False)), CharTokenizer(LETTERS)).save(
        files / "attention"
    )
    done = call("asr.tune", files, "--model", files / "attention", "--ctc-weights", 0, 0.3)
    assert done.returncode == 2 and b"this model has no CTC head" in done.stderr
    (files / "model" / "decoding.json").unlink(missing_ok=True)
    (files / "model" / "decoding.json").mkdir()
    done = call("asr.tune", files, "--model", files / "model", "--write")
    assert done.returncode == 2 and b"decoding.json" in done.stderr


@pytest.mark.parametrize(
    ("flag", "missing"), [("--lm-weights", "--lm"), ("--ilm-weights", "--lm"), ("--ngram-weights", "--ngram")]
)
def test_weights_of_a_model_that_is_not_there_are_not_tuned(files, flag, missing):
    done = call("asr.tune", files, "--model", files / "model", flag, 0.2, 0.4)
    assert done.returncode == 2
    assert f"{flag} needs another model: give one with {missing}" in done.stderr.decode()


@pytest.mark.parametrize(("one", "several"), [("--ctc-weight", "--ctc-weights"), ("--lm-weight", "--lm-weights")])
def test_a_weight_that_is_given_and_tuned_is_refused(files, one, several):
    done = call("asr.tune", files, "--model", files / "model", one, 0, several, 0.2, 0.4)
    assert done.returncode == 2
    assert done.stderr.decode() == f"asr.tune: {one} would have no effect: {several} are tried\n"


def test_tuning_does_not_change_the_model_that_ships(files):
    done = call("asr.tune", files, "--write")
    assert done.returncode == 2
    assert b"--write needs --model" in done.stderr


@pytest.mark.parametrize(
    ("strategy", "flag", "beam"),
    [
        ("greedy", "--lm-weights", 1),
        ("greedy", "--length-bonuses", 1),
        ("ctc", "--ctc-weights", 5),
        ("ctc", "--lm-weights", 1),
    ],
)
def test_what_makes_no_difference_to_a_strategy_is_not_tuned(files, strategy, flag, beam):
    done = call("asr.tune", files, "--strategy", strategy, "--beam-size", beam, flag, 0.1, 0.2)
    assert done.returncode == 2
    assert f"{flag} have no effect on --strategy {strategy}" in done.stderr.decode()


def test_words_of_scripts_without_spaces_are_right_where_all_of_their_letters_are():
    """In the token of two letters the second is always right, and the first is right where the token scored high."""
    heard = [[("天気", -2.0), ("は", -0.1)]] * 4 + [[("天気", -0.1), ("は", -0.1)]] * 2
    transcripts = [
        Transcript("", segments=[Segment(0.0, 1.0, "", 0.0, words=[Word(t, 0.5, token_scores=(s,)) for t, s in row])])
        for row in heard
    ]
    texts = ["".join(text for text, _ in row) for row in heard]
    scored = types.SimpleNamespace(
        references=["木気は"] * 4 + ["天気は"] * 2, hypotheses=texts, transcripts=transcripts
    )
    fitted = calibrate(scored)
    assert fitted.after < fitted.before
    low, high = word_confidences([(-2.0,), (-0.1,)], fitted.calibration).tolist()
    assert low < 0.1 and high > 0.9
