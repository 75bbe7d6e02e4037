"""Masks. Everywhere in this package a mask is bool and True means masked out."""

from __future__ import annotations

import torch
from torch import Tensor


def length_mask(lens: Tensor, size: int) -> Tensor:
    """Keys in the padding: `lens (B,)` -> `(B, 1, 1, L_k)`, True at and after each length."""
    return (torch.arange(size, device=lens.device) >= lens[:, None])[:, None, None, :]


def causal_mask(size: int, device: torch.device | None = None) -> Tensor:
    """Keys in the future: `(T', T')`, True above the diagonal."""
    return torch.ones(size, size, dtype=torch.bool, device=device).triu(1)
