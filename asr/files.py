"""Files that are written completely or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The file to write instead of `path`, with the same suffix; it replaces `path` at the end. If writing fails,
    nothing is left of it, `path` is as it was, and an OSError names `path` (that of a full disk names no file)."""
    unfinished = path.with_name(f".{path.name}")
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        if isinstance(error, OSError) and error.errno:
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
