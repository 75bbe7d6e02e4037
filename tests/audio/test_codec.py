import numpy as np
import pytest

from asr.audio.codec import COMPRESSIONS, require_mp3, through_mp3
from asr.audio.reading import SAMPLE_RATE

NOISE = np.random.default_rng(1).normal(0, 0.1, 2 * SAMPLE_RATE).astype(np.float32)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize("length", [400, 16000, 32000])
def test_a_sound_stays_as_long_and_where_it_was(compression, length):
    samples = NOISE[:length].copy()
    heard = through_mp3(samples, compression)
    assert heard.shape == samples.shape and heard.dtype == np.float32
    if length >= 16000:
        shifts = range(-3, 4)
        alike = [np.dot(heard[100:-100], np.roll(samples, shift)[100:-100]) for shift in shifts]
        assert shifts[int(np.argmax(alike))] == 0


@pytest.mark.parametrize(
    ("compression", "below", "above"), [(COMPRESSIONS[0], 6500, 7250), (COMPRESSIONS[1], 5000, 5750)]
)
def test_what_lies_high_is_gone(compression, below, above):
    power = np.abs(np.fft.rfft(through_mp3(NOISE, compression))) ** 2
    hertz = np.fft.rfftfreq(len(NOISE), 1 / SAMPLE_RATE)
    assert power[hertz > above].sum() < 1e-4 * power.sum()
    assert power[(hertz > below - 500) & (hertz < below)].sum() > 0.02 * power.sum()


def test_samples_beyond_the_full_scale_are_not_clipped():
    heard = through_mp3(1000 * NOISE, COMPRESSIONS[0])
    assert np.corrcoef(heard, through_mp3(NOISE, COMPRESSIONS[0]))[0, 1] > 0.95


def test_a_library_without_mp3_is_named(monkeypatch):
    require_mp3()
    monkeypatch.setattr("soundfile.available_formats", lambda: {"FLAC": "FLAC"})
    with pytest.raises(ValueError, match="libsndfile"):
        require_mp3()
