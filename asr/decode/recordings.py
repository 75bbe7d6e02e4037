"""The input of a recogniser: a recording in any of its forms, read as blocks of samples or as a matrix."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import numpy as np
from torch import Tensor

from asr.audio.matrices import as_matrix, read_matrix
from asr.audio.reading import LOUDEST, AudioError, printable, stream_audio
from asr.model.speech_model import SpeechModel

Recording = str | os.PathLike | bytes | BinaryIO | np.ndarray | Tensor


def is_one(recordings: object) -> bool:
    """Whether this is a single recording, not several."""
    return isinstance(recordings, str | os.PathLike | bytes | np.ndarray | Tensor) or hasattr(recordings, "read")


def name_of(recording: Recording) -> str:
    """The name of a recording in transcripts and errors. Raises TypeError for anything that is not a recording."""
    if isinstance(recording, np.ndarray | Tensor):
        return "<array>"
    if isinstance(recording, bytes):
        return "<bytes>"
    if hasattr(recording, "read"):
        name = getattr(recording, "name", "") or "<file>"  # an upload may have an empty one
        return printable(name) if isinstance(name, str | bytes) else str(name)
    if not isinstance(recording, str | os.PathLike):
        raise TypeError(f"a recording is a path, bytes, a file, an array or a tensor, not {type(recording).__name__}")
    return printable(recording)


def named(recordings: Iterable[Recording], raised: list[Exception]) -> Iterator[tuple[str, Recording]]:
    """Each recording with its name. An exception of the iterable, or of an item that is no recording, ends the
    iteration and is put into `raised`: the recordings before it are still transcribed."""
    try:
        for recording in recordings:
            yield name_of(recording), recording
    except Exception as error:
        raised.append(error)


def sound_of(recording: Recording, channel: int | None = None) -> Iterator[np.ndarray]:
    """Samples `(N,)` at 16 kHz, float32, in blocks; `channel` as in `read_audio`. Raises AudioError for data that are
    not audio, after the blocks before them."""
    if not isinstance(recording, np.ndarray | Tensor):
        yield from stream_audio(recording, None if recording == "-" else name_of(recording), channel)
        return
    samples = _array(recording)
    if samples.ndim != 1:
        one = ": one channel at a time, or their mean" if samples.ndim == 2 else ""
        raise AudioError(f"{name_of(recording)}: this model hears samples (N,), not {samples.shape}{one}")
    if samples.dtype.kind != "f" and samples.dtype.newbyteorder("=") != np.int16:
        raise AudioError(f"{name_of(recording)}: samples are floats in [-1, 1] or int16, not {samples.dtype}")
    with np.errstate(over="ignore"):
        samples = samples.astype(np.float32) / (32768 if samples.dtype.kind == "i" else 1)
    if not (np.abs(samples) <= LOUDEST).all():  # NaN fails this test, too
        raise AudioError(f"{name_of(recording)}: samples must be finite, and not beyond 2^31")
    yield samples


def matrix_of(recording: Recording, width: int) -> np.ndarray:
    """A feature matrix `(T, width)`. Raises AudioError for anything else, and for a matrix of another width."""
    is_array = isinstance(recording, np.ndarray | Tensor)
    if not is_array and not isinstance(recording, str | os.PathLike):
        raise AudioError(f"{name_of(recording)}: a matrix is an array, or a file given by its path (.npy or .pt)")
    matrix = as_matrix(_array(recording), name_of(recording)) if is_array else read_matrix(recording)
    if reason := misfit(matrix, width):
        raise AudioError(f"{name_of(recording)}: {reason}")
    return matrix


def misfit(matrix: np.ndarray, width: int) -> str | None:
    """Why a model of matrices `(T, width)` cannot read the matrix; None: it can."""
    return None if matrix.shape[1] == width else f"this model reads matrices (T, {width}), not {matrix.shape}"


def _array(recording: np.ndarray | Tensor) -> np.ndarray:
    if isinstance(recording, np.ndarray):
        return np.asarray(recording)  # for a masked array, the data under the mask
    recording = recording.detach().cpu()
    return (recording.float() if recording.is_floating_point() else recording).numpy()


def random_inputs(model: SpeechModel, lens: Iterable[int]) -> list[np.ndarray]:
    """A batch of noise, of random frames or of random tokens, so many each, as `Recognizer.recognize` takes it."""
    rng, config, takes = np.random.default_rng(0), model.transformer.config, model.front_end.config.takes
    if takes == "text":
        return [rng.integers(config.vocab_size, size=size) for size in lens]
    width = [config.input_dim] if takes == "matrix" else []
    return [rng.normal(0, 0.1, (size, *width)).astype(np.float32) for size in lens]
