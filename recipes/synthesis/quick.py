"""Engines that are tens of times as fast as real time: hibari (Apache-2.0, PyPI `hibari-tts`; its voice learnt from one
of Kokoro's) and flite (free, Debian `flite`; three speakers of CMU ARCTIC). Their four voices become many by size: a
voice that is played more slowly seems to come from a longer vocal tract, and speaks faster to compensate.

    pip install 'hibari-tts[fast]' soundfile soxr
"""

from __future__ import annotations

import io
import shutil
import subprocess
from dataclasses import dataclass

import numpy as np
import soundfile
from hibari import Hibari
from utterance import as_utterance

HIBARI, HIBARI_RATE = "hibari", 24_000
VOICES = {HIBARI: 0.4, "rms": 0.2, "slt": 0.2, "awb": 0.2}  # and each one's share of the utterances
SIZES = (0.8, 1.25)


@dataclass(frozen=True)
class Speaker:
    """A voice, and the length of the vocal tract relative to its own."""

    voice: str
    size: float

    def __str__(self) -> str:
        return f"{self.voice}*{self.size}"


class Quick:
    """hibari and flite, in any size."""

    def __init__(self):
        if not shutil.which("flite"):
            raise SystemExit("flite is not installed; Debian's package has its name")
        self.hibari = Hibari(threads=1)

    def draw(self, rng: np.random.Generator) -> Speaker:
        voice = str(rng.choice(list(VOICES), p=list(VOICES.values())))
        return Speaker(voice, round(float(np.exp(rng.uniform(*np.log(SIZES)))), 2))

    def speak(self, text: str, speaker: Speaker, speed: float, rng: np.random.Generator) -> np.ndarray:
        """Samples `(N,)` at 16 kHz. Raises ValueError if nothing was said."""
        pace = speed * speaker.size
        if speaker.voice == HIBARI:
            audio, rate = self.hibari(text, speed=pace, seed=int(rng.integers(2**31))), HIBARI_RATE
        else:
            command = ["flite", "-voice", speaker.voice, "--setf", f"duration_stretch={1 / pace}", "-t", text, "-o"]
            said = subprocess.run([*command, "/dev/stdout"], capture_output=True, check=True).stdout
            audio, rate = soundfile.read(io.BytesIO(said), dtype="float32")
        return as_utterance(audio, rate / speaker.size, rng)
