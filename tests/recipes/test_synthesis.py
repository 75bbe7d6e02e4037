"""Training speech synthesised from a text: which sentences are spoken, and by whom."""

import shutil

import numpy as np
import pytest

from asr.text.normalizer import english
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def recipe(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "recipes" / "synthesis")


def scored(text: str) -> set[tuple[str, ...]]:
    """The word sequences that `said_in` finds in a corpus of one utterance."""
    from sentences import runs

    return set(runs(english(text).split()))


def test_sentences_of_common_letters_are_spoken_neither_short_nor_long():
    from sentences import speakable

    good = ["He went out, and the door fell shut.", "Don't!  Not you, 'my friend'."]
    lines = ["Too short.", *good, "In 1851 he left.", "Café au lait is all I ask for.", "so and " * 20]
    assert list(speakable(lines, set())) == good


def test_nothing_is_spoken_that_shares_six_words_with_a_set_that_is_scored():
    from sentences import speakable

    said = scored("The old man walked slowly down the long road to the sea.")
    shared = "And then the old man walked slowly down, alone."
    fewer = "And then the old man walked quickly down the long road."
    assert list(speakable([shared, fewer], said)) == [fewer]


def test_a_short_sentence_that_is_scored_is_not_spoken_either():
    from sentences import speakable

    assert list(speakable(["Open the door."], scored("OPEN THE DOOR"))) == []


@pytest.fixture
def quick():
    pytest.importorskip("hibari", reason="hibari-tts is not installed")
    pytest.importorskip("soxr", reason="soxr is not installed")
    if not shutil.which("flite"):
        pytest.skip("flite is not installed")
    from quick import Quick

    return Quick()


@pytest.mark.parametrize("voice", ["hibari", "rms", "slt", "awb"])
def test_size_lowers_the_pitch_and_leaves_the_pace(quick, voice):
    from quick import Speaker

    def spoken(size):
        return quick.speak("He went out, and the door fell shut behind him.", Speaker(voice, size), 1.0, generator())

    def generator():
        return np.random.default_rng(0)

    def centre(sound):  # the centre of the spectrum's energy
        energy = np.square(np.abs(np.fft.rfft(sound)))
        return energy @ np.arange(len(energy)) / energy.sum() / len(sound)

    small, large = spoken(0.8), spoken(1.25)
    assert len(large) == pytest.approx(len(small), rel=0.15)
    assert centre(large) < 0.8 * centre(small)
    assert np.array_equal(small, spoken(0.8))


def test_without_flite_nothing_is_spoken_at_all(quick, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="flite"):
        type(quick)()
