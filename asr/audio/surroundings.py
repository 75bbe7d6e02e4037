"""Recorded surroundings of speech: a room, by its impulse response, and noise (Ko et al. 2017, "A study on data
augmentation of reverberant speech for robust speech recognition"; Snyder et al. 2015, MUSAN)."""

from __future__ import annotations

import numpy as np

from asr.audio.distort import LEVEL_FLOOR, fft_size


def in_room(samples: np.ndarray, response: np.ndarray) -> np.ndarray:
    """`samples (N,)` as a microphone hears them in the room of an impulse `response (M,)`: `(N,)`, float32, as loud as
    before; the direct sound, which is the response's loudest, is not late."""
    response = response[np.abs(response).argmax() :]
    size = fft_size(len(samples) + len(response))
    heard = np.fft.irfft(np.fft.rfft(samples, size) * np.fft.rfft(response, size), size)[: len(samples)]
    return (heard * (level(samples) / max(level(heard), LEVEL_FLOOR))).astype(np.float32)


def over_noise(samples: np.ndarray, noise: np.ndarray, snr: float) -> np.ndarray:
    """`samples (N,)` with `noise (M,)`, which is repeated where it is shorter, `snr` decibels below: `(N,)`."""
    noise = np.resize(noise, len(samples))
    gain = 10 ** (-snr / 20) * level(samples) / max(level(noise), LEVEL_FLOOR)
    return (samples + gain * noise).astype(np.float32)


def level(samples: np.ndarray) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(samples, dtype=np.float64))))
