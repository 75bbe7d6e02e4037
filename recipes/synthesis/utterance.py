"""Turns the output of an engine into an utterance of a corpus."""

from __future__ import annotations

import numpy as np
import soxr

from asr.audio.reading import SAMPLE_RATE


def as_utterance(audio: np.ndarray, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Resamples samples `(N,)` from `rate` to 16 kHz, with 0.1 to 0.2 s of silence around the speech, at a level that
    `rng` draws. Raises ValueError if nothing was said."""
    audio = soxr.resample(_trim(audio, round(rate), rng), rate, SAMPLE_RATE, quality="VHQ")
    audio *= rng.uniform(0.3, 0.9) / np.abs(audio).max()
    return audio


def _trim(audio: np.ndarray, rate: int, rng: np.random.Generator) -> np.ndarray:
    """Trims to 0.1 to 0.2 s around the speech, which is everything within 42 dB of the loudest 10 ms."""
    hop = rate // 100
    frames = audio[: len(audio) // hop * hop].reshape(-1, hop)
    energy = np.square(frames.astype(np.float64)).mean(axis=1)
    if not energy.any():
        raise ValueError("nothing was said")
    loud = np.flatnonzero(energy > energy.max() * 10**-4.2)
    head, tail = (int(margin * rate) for margin in rng.uniform(0.1, 0.2, size=2))
    start, end = int(loud[0]) * hop - head, int(loud[-1] + 1) * hop + tail
    audio = np.pad(audio, (max(0, -start), max(0, end - len(audio))))
    return audio[max(0, start) :][: end - start]
