"""Averages of weights: over the best checkpoints ("Attention Is All You Need", section 6.1), and between a fine-tuned
model and the one that it began as (Wortsman et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor


def keep_best(out: Path, figure: str, decimals: int, count: int = 1) -> ModelCheckpoint:
    """Keeps the checkpoints of the `count` epochs whose logged `figure` is least, in its name to so many `decimals`; an
    epoch that is repeated after a kill replaces what it had saved."""
    return ModelCheckpoint(
        out / "checkpoints",
        filename=f"{{epoch:03d}}-{{{figure}:.{decimals}f}}",
        auto_insert_metric_name=False,
        monitor=figure,
        save_top_k=count,
        enable_version_counter=False,
    )


def best_checkpoints(out: Path) -> list[Path]:
    """Best first, by the figure in their names: Lightning forgets which were best when the folder is moved."""
    return sorted((out / "checkpoints").glob("[0-9]*-*.ckpt"), key=lambda path: float(path.stem.split("-")[1]))


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


def interpolate(weights: dict[str, Tensor], origin: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """(1 - share) · weights + share · origin, tensors of the same names and shapes."""
    return {name: torch.lerp(tensor, origin[name], share) for name, tensor in weights.items()}
