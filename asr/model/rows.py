"""Selection of whole rows of a batch, from tensors and from the states of a search."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """`x[b, index[b, i]]`: `x (B, N, ...)`, `index (B, I)` -> `(B, I, ...)`.

    The same as `gather` with an expanded index, which looks up each number of a row separately: on a CPU this is up to
    forty times as fast."""
    B, N = x.shape[:2]
    rows = index + N * torch.arange(B, device=x.device)[:, None]
    return x.flatten(0, 1).index_select(0, rows.flatten()).unflatten(0, index.shape)


def select(state: Any, utterances: Tensor) -> Any:
    """Selects utterances from a tensor `(B, ...)`, or from lists, tuples and dataclasses of them; keeps all else."""
    if isinstance(state, Tensor):
        return state.index_select(0, utterances)
    if isinstance(state, list | tuple):
        return type(state)(select(part, utterances) for part in state)
    if is_dataclass(state):
        return replace(state, **{f.name: select(getattr(state, f.name), utterances) for f in fields(state)})
    return state
