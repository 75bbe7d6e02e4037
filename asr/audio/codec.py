"""Speech after a lossy codec: MP3 at the bit rates of small files and old archives.

MP3 removes everything above 5 to 7 kHz and adds noise of its own to the rest. A model that has never heard it makes a
seventh more errors (docs/notebook/training.md)."""

from __future__ import annotations

import io

import numpy as np
import soundfile

from asr.audio.reading import SAMPLE_RATE, within_range

COMPRESSIONS = (0.8, 0.95)  # compression levels of libsndfile: 40 and 16 kbit/s at 16 kHz
DELAY = 1105  # samples of delay of an encoder and a decoder, if the file has no room to record it


def require_mp3() -> None:
    """Raises ValueError if the installed libsndfile does not support MP3."""
    if "MP3" not in soundfile.available_formats():
        raise ValueError("the installed libsndfile cannot write MP3: it is older than 1.1, or was built without it")


def through_mp3(samples: np.ndarray, compression: float) -> np.ndarray:
    """Encodes and decodes `samples (N,)` at 16 kHz, float32: `(N,)`. `compression` lies in [0, 1), from 160 to 8
    kbit/s; soundfile raises LibsndfileError for other values, and if it does not support MP3 (`require_mp3`)."""
    file = io.BytesIO()
    soundfile.write(
        file,
        within_range(samples),
        SAMPLE_RATE,
        format="MP3",
        subtype="MPEG_LAYER_III",
        bitrate_mode="CONSTANT",
        compression_level=compression,
    )
    file.seek(0)
    decoded, _ = soundfile.read(file, dtype="float32")
    return decoded if len(decoded) == len(samples) else decoded[DELAY : DELAY + len(samples)]
