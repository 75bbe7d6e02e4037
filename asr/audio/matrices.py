"""Reading feature matrices that were computed elsewhere, as input instead of audio. No objects are unpickled."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np

from asr.audio.headers import AudioError
from asr.audio.reading import printable

MATRIX_SUFFIXES = frozenset({".npy", ".pt"})


def read_matrix(path: str | os.PathLike) -> np.ndarray:
    """A precomputed feature matrix `(T, d)`, float32, from `.npy` or `.pt`; unpickles no objects. Raises AudioError."""
    return as_matrix(_stored(path), printable(path))


def read_shape(path: str | os.PathLike) -> tuple[int, int]:
    """T and d of a feature matrix; a `.npy` has them in its header. Raises AudioError like `read_matrix`, but does not
    check the values."""
    stored = _stored(path, mmap_mode="r")
    _check_matrix(stored, printable(path))
    return stored.shape


def _stored(path: str | os.PathLike, mmap_mode: str | None = None) -> np.ndarray:
    if Path(path).suffix.lower() not in MATRIX_SUFFIXES:
        raise AudioError(f"{path}: not a feature matrix (.npy or .pt)")
    try:
        if Path(path).suffix.lower() == ".pt":
            import torch

            tensor = torch.load(path, map_location="cpu", weights_only=True).detach()
            stored = (tensor.float() if tensor.is_floating_point() else tensor).numpy()  # numpy has no bfloat16
        else:
            stored = np.load(path, mmap_mode, allow_pickle=False)
            if not isinstance(stored, np.ndarray):
                raise ValueError("an archive of several arrays")
    except FileNotFoundError:
        raise AudioError(f"{path}: no such file") from None
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        if isinstance(error, pickle.UnpicklingError) or "allow_pickle" in reason:  # advice to load it unsafely
            reason = "no array that numpy.save or tensor that torch.save has written"
        raise AudioError(f"{path}: not a feature matrix ({reason})") from None
    if not stored.size:
        raise AudioError(f"{path}: the feature matrix is empty")
    return stored


def as_matrix(matrix: np.ndarray, name: str) -> np.ndarray:
    """An array as a feature matrix `(T, d)`, float32. Raises AudioError, which calls it `name`, if it is not one."""
    _check_matrix(matrix, name)
    with np.errstate(over="ignore"):
        matrix = matrix.astype(np.float32)
    if not np.isfinite(matrix).all():
        raise AudioError(f"{name}: the feature matrix has values that are not finite")
    return matrix


def _check_matrix(matrix: np.ndarray, name: str) -> None:
    if matrix.ndim != 2 or matrix.dtype.kind not in "fiu":
        raise AudioError(f"{name}: a feature matrix is (T, d), of numbers, and not {matrix.shape}, {matrix.dtype}")
