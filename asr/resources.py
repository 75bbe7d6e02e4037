"""Finds the configs and data that ship with the project: inside the wheel, or at the root of a checkout."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent


def resource(*parts: str) -> Path:
    """The path of a shipped file or folder: `resource("data", "digits", "train.tar")`."""
    installed = PACKAGE.joinpath(*parts)
    return installed if installed.exists() else PACKAGE.parent.joinpath(*parts)
