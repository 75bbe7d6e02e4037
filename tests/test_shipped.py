"""What ships keeps its promises: the model, its card, the samples of the README's first command."""

import json

import pytest

import asr
from asr.resources import resource

SAMPLES = sorted(resource("data", "samples").glob("*.flac"))


def test_there_are_three_samples():
    assert len(SAMPLES) == 3


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("precision", ["float32", "auto"])
def test_the_samples_are_transcribed_exactly(sample, precision):
    said = sample.with_suffix(".txt").read_text(encoding="utf-8").strip()
    recognizer = asr.load(precision=precision)
    assert recognizer.transcribe(sample).text == recognizer.model.normalize(said)


def test_the_model_is_small_enough_and_has_its_card():
    folder = resource("data", "models", "english")
    assert sum(path.stat().st_size for path in folder.iterdir() if path.is_file()) <= 20 * 2**20
    assert sum(path.stat().st_size for path in (folder / "lm").iterdir()) <= 8 * 2**20
    card = (folder / "README.md").read_text(encoding="utf-8")
    for needed in ("licence", "Word error rate", "bad at", "Making it again"):
        assert needed in card
    assert json.loads((folder / "config.json").read_text())["normalizer"] == "english"
