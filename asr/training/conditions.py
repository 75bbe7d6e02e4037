"""Simulated recording conditions for training utterances: recorded rooms and noise (Ko et al. 2017; Snyder et al.
2015, MUSAN), and a lossy codec. They are applied by the processes that read the audio; distortions that are drawn
rather than recorded are added on the device (`asr.audio.distort`)."""

from __future__ import annotations

import logging
import random

import numpy as np
import torch
from lhotse import MonoCut

from asr.audio.codec import COMPRESSIONS, require_mp3, through_mp3
from asr.audio.distort import LEVEL_FLOOR, mix, reverberate
from asr.audio.headers import AudioError
from asr.audio.reading import SAMPLE_RATE
from asr.corpus import input_kind, open_corpus, read_cut
from asr.training.config import SoundConfig

logger = logging.getLogger(__name__)


class Conditions:
    """Applies a room, noise and a codec, in this natural order, each to an independent share of the utterances."""

    def __init__(self, config: SoundConfig):
        """Raises ValueError for rooms or noises that are not audio, and if a codec is asked for but MP3 is missing."""
        self.config = config
        self.rirs = _recordings("data.rirs", config.rirs)
        self.noises = _recordings("data.noises", config.noises)
        self.unreadable: set[str] = set()  # ids of recordings that were reported
        if config.codec:
            require_mp3()

    def __call__(self, samples: np.ndarray, draw: random.Random) -> np.ndarray:
        """`samples (N,)` at 16 kHz -> `(N,)`. A recording that cannot be read is reported and left out."""
        config = self.config
        if self.rirs and draw.random() < config.rir_prob:
            samples = _in_room(samples, self._read(draw.choice(self.rirs)))
        if self.noises and draw.random() < config.noise_prob:
            noise = self._read(_excerpt(draw.choice(self.noises), len(samples) / SAMPLE_RATE, draw))
            samples = _over_noise(samples, noise, draw.uniform(*config.snr))
        if draw.random() < config.codec:
            samples = through_mp3(samples, draw.uniform(*COMPRESSIONS))
        return samples

    def _read(self, cut: MonoCut) -> np.ndarray:
        """The samples of a recording, `(M,)`; empty if it cannot be read."""
        try:
            return read_cut(cut)
        except AudioError as error:
            if cut.recording.id not in self.unreadable:
                logger.warning("%s cannot be read and is left out: %s", cut.recording.id, error)
                self.unreadable.add(cut.recording.id)
            return np.zeros(0, np.float32)


def _recordings(option: str, corpora: list[str]) -> list[MonoCut]:
    cuts = list(open_corpus(corpora, transcribed=False)) if corpora else []
    for cut in cuts:
        if input_kind(cut) != "sound":
            raise ValueError(f"{option}: {cut.id} is {input_kind(cut)}, and not sound")
    return cuts


def _excerpt(cut: MonoCut, seconds: float, draw: random.Random) -> MonoCut:
    """A stretch of `seconds` from anywhere in a recording that is longer."""
    if cut.duration <= seconds:
        return cut
    return cut.truncate(offset=draw.uniform(0, cut.duration - seconds), duration=seconds)


def _in_room(samples: np.ndarray, response: np.ndarray) -> np.ndarray:
    """Reverberates with a `response (M,)` from its loudest sample, the direct sound, so as to add no delay; a silent
    response is ignored."""
    if np.abs(response).max(initial=0.0) < LEVEL_FLOOR:
        return samples
    x, response = torch.from_numpy(samples)[None], torch.from_numpy(response[np.abs(response).argmax() :])[None]
    return reverberate(x, torch.tensor([len(samples)]), response)[0].numpy()


def _over_noise(samples: np.ndarray, noise: np.ndarray, snr: float) -> np.ndarray:
    """Adds `noise (M,)`, repeated if it is shorter, `snr` decibels below the speech."""
    if not len(noise):
        return samples
    x, y = (torch.from_numpy(part)[None] for part in (samples, np.resize(noise, len(samples))))
    lens = torch.tensor([len(samples)])
    return mix(x, lens, y, lens, torch.tensor([[snr]]))[0].numpy()
