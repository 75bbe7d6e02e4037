import numpy as np
import pytest

from asr.audio.surroundings import in_room, level, over_noise


@pytest.fixture
def speech():
    return np.random.default_rng(0).standard_normal(4000).astype(np.float32)


def test_a_room_without_walls_changes_nothing(speech):
    np.testing.assert_allclose(in_room(speech, np.array([0.0, 0.0, 0.3])), speech, atol=1e-5)


def test_a_room_is_a_convolution_from_the_direct_sound_on(speech):
    response = np.array([0.0, 0.1, 1.0, 0.0, -0.5])
    expected = np.convolve(speech, response[2:])[:4000]
    heard = in_room(speech, response)
    assert heard.dtype == np.float32
    np.testing.assert_allclose(heard, expected * level(speech) / level(expected), atol=1e-5)
    assert level(heard) == pytest.approx(level(speech))


@pytest.mark.parametrize("length", [300, 4000, 9000])
def test_noise_lies_so_many_decibels_below_the_speech(speech, length):
    noise = np.random.default_rng(1).standard_normal(length)
    added = over_noise(speech, noise, snr=12.0) - speech
    assert 20 * np.log10(level(speech) / level(added)) == pytest.approx(12.0, abs=1e-3)
    if length == 300:  # again and again
        np.testing.assert_allclose(added[:300], added[300:600], atol=1e-6)


def test_silence_stays_silent_and_silent_noise_is_none(speech):
    assert not over_noise(np.zeros(100, np.float32), np.ones(100), 5.0).any()
    assert not in_room(np.zeros(100, np.float32), np.ones(3)).any()
    np.testing.assert_array_equal(over_noise(speech, np.zeros(10), 5.0), speech)
