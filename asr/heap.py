"""The heap of a process that computes on a CPU: blocks that glibc keeps or returns, kernels that oneDNN keeps.

Where the C library is another one, the functions for blocks do nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h


def keep_freed_blocks() -> None:
    """Stops glibc from returning freed blocks to the kernel, which clears them anew for every step: a sixth of the time
    of a training."""
    mallopt = _of_libc("mallopt")
    if mallopt:
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**28)):
            mallopt(option, value)


def return_freed_blocks() -> None:
    """Gives back to the kernel what is free, wherever in the heap it lies."""
    trim = _of_libc("malloc_trim")
    if trim:
        trim(0)


def keep_kernels(count: int) -> None:
    """How many kernels oneDNN keeps, instead of 1,024: one is compiled for each shape of each product, and takes half a
    megabyte. It reads the variables when it makes the first kernel, which must come later. What a user set stays."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # the second is torch's own, around oneDNN
        os.environ.setdefault(name, str(count))


def _of_libc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
