"""Masks. Everywhere in this package a mask is bool and True means masked out; decoding, which uses one mask for many
layers, converts it beforehand into the numbers that attention adds to its scores."""

from __future__ import annotations

import torch
from torch import Tensor


def length_mask(lens: Tensor, size: int) -> Tensor:
    """Keys in the padding: `lens (B,)` -> `(B, 1, 1, L_k)`, True at and after each length."""
    return (torch.arange(size, device=lens.device) >= lens[:, None])[:, None, None, :]


def additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers to add to the scores: 0 where `mask` is False, the lowest finite number where it is True.

    A fully masked row then attends to all keys equally, while the bool mask gives zeros."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, torch.finfo(dtype).min)


def causal_mask(size: int, device: torch.device | None = None) -> Tensor:
    """Keys in the future: `(T', T')`, True above the diagonal."""
    return torch.ones(size, size, dtype=torch.bool, device=device).triu(1)


def empty_rows(mask: Tensor | None) -> Tensor | None:
    """The rows that a bool mask masks out fully, `(..., 1)`; None if there is no bool mask."""
    return None if mask is None or mask.is_floating_point() else mask.all(dim=-1, keepdim=True)


def either(mask: Tensor | None, other: Tensor) -> Tensor:
    """The union of two bool masks, of which the first may be None."""
    return other if mask is None else mask | other


def window_mask(size: int, left: int, right: int, device: torch.device | None = None) -> Tensor:
    """Keys outside the window: `(L, L)`, True where a key is more than `left` before or `right` after its query."""
    position = torch.arange(size, device=device)
    distance = position[None, :] - position[:, None]
    return (distance < -left) | (distance > right)
