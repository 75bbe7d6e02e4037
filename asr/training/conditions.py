"""Under which conditions the training's utterances seem to have been recorded: in rooms and noise of which there are
recordings, through a lossy codec. The processes that read the sound see to it; what is drawn and not recorded is added
on the device (`asr.audio.distort`)."""

from __future__ import annotations

import random

import numpy as np
from lhotse import MonoCut

from asr.audio.codec import COMPRESSIONS, require_mp3, through_mp3
from asr.audio.reading import SAMPLE_RATE
from asr.audio.surroundings import in_room, over_noise
from asr.corpus import input_kind, iterate, open_corpus
from asr.training.config import SoundConfig


class Conditions:
    """Each meets with a share of the utterances, by itself, in the order of nature: the room, noise, the codec."""

    def __init__(self, config: SoundConfig):
        """Raises ValueError for rooms or noises that are none, and where there is no MP3."""
        self.config = config
        self.rooms = _recordings("data.rooms", config.rooms)
        self.noises = _recordings("data.noises", config.noises)
        if config.codec:
            require_mp3()

    def __call__(self, samples: np.ndarray, draw: random.Random) -> np.ndarray:
        """`samples (N,)` at 16 kHz -> `(N,)`. A recording that cannot be read is reported, and left out."""
        config = self.config
        if self.rooms and draw.random() < config.room:
            response = _read(draw.choice(self.rooms))
            samples = samples if response is None else in_room(samples, response)
        if self.noises and draw.random() < config.noise:
            noise = _read(_excerpt(draw.choice(self.noises), len(samples) / SAMPLE_RATE, draw))
            snr = draw.uniform(*config.snr)
            samples = samples if noise is None else over_noise(samples, noise, snr)
        if draw.random() < config.codec:
            samples = through_mp3(samples, draw.uniform(*COMPRESSIONS))
        return samples


def _recordings(option: str, corpora: list[str]) -> list[MonoCut]:
    cuts = list(open_corpus(corpora, transcribed=False)) if corpora else []
    for cut in cuts:
        if input_kind(cut) != "sound":
            raise ValueError(f"{option}: {cut.id} is {input_kind(cut)}, and not sound")
    return cuts


def _excerpt(cut: MonoCut, seconds: float, draw: random.Random) -> MonoCut:
    """So much of a longer recording, from anywhere."""
    if cut.duration <= seconds:
        return cut
    return cut.truncate(offset=draw.uniform(0, cut.duration - seconds), duration=seconds)


def _read(cut: MonoCut) -> np.ndarray | None:
    return next((samples for _, samples in iterate([cut])), None)
