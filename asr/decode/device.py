"""The device that decodes."""

from __future__ import annotations

import os

import torch


def default_device() -> str:
    """A GPU if there is one (for each process started by torchrun its own), else the CPU."""
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu"


def existing_device(device: str | None, option: str = "device") -> str:
    """The device, or the default one for None. Raises ValueError, which names the `option`, if it does not exist."""
    wanted = default_device() if device is None else device
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, AssertionError) as error:  # torch's
        said = str(error).partition("\n")[0]
        if said.startswith("Could not run"):  # followed by a screenful on its dispatcher
            said = "this PyTorch does not compute on it"
        raise ValueError(("" if device is None else f"{option} {device}: ") + said) from None
    return wanted
