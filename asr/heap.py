"""The heap of a process that computes on a CPU: blocks that glibc keeps or returns, kernels that oneDNN keeps, objects
that Python's garbage collector looks through.

With another C library than glibc, the functions for blocks do nothing.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # from glibc's malloc.h


def keep_freed_blocks() -> None:
    """Stops glibc from returning freed blocks to the kernel, which would clear them again for every step: a sixth of
    the training time."""
    mallopt = _of_libc("mallopt")
    if mallopt:
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**28)):
            mallopt(option, value)


def return_freed_blocks() -> None:
    """Returns free memory to the kernel, wherever it lies in the heap."""
    trim = _of_libc("malloc_trim")
    if trim:
        trim(0)


def keep_kernels(count: int) -> None:
    """Sets how many kernels oneDNN keeps, instead of 1,024: it compiles one of half a megabyte for each shape of each
    product. Call this before the first kernel is made, when oneDNN reads the variables; a user's own values stay."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # the second: torch's own, around oneDNN
        os.environ.setdefault(name, str(count))


@contextmanager
def importing() -> Iterator[None]:
    """For the heavy imports of a command: the garbage collector looks through their objects neither again and again
    meanwhile nor ever after, not even at the end of the process: a quarter of the time of a tiny training."""
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > before:
            gc.freeze()
        gc.enable()


def _of_libc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
