"""Checkpoint averaging: the mean of the weights of the best checkpoints ("Attention Is All You Need", section 6.1)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor


def average_checkpoints(paths: Sequence[str | Path], prefix: str = "model.") -> dict[str, Tensor]:
    """The mean of the tensors called `prefix…` in Lightning checkpoints, without the prefix; sums in float64.

    Raises ValueError where `paths` is empty."""
    if not paths:
        raise ValueError("no checkpoint to average")
    totals: dict[str, Tensor] = {}
    for path in paths:
        state = torch.load(path, map_location="cpu", weights_only=True)["state_dict"]
        for name, tensor in state.items():
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                totals[name] = totals.get(name, 0) + tensor.double()
    return {name: (total / len(paths)).float() for name, total in totals.items()}
