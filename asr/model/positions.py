"""Positions: sinusoids ("Attention Is All You Need", section 3.5), a learned table, or rotations (Su et al. 2021)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from asr.model.config import ModelConfig
from asr.model.dropout import Dropout


def sinusoids(length: int, d_model: int, offset: int = 0, device: torch.device | None = None) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/D)), PE(pos, 2i+1) = cos(the same), pos from `offset`: `(length, D)`."""
    position = torch.arange(offset, offset + length, device=device, dtype=torch.float32)
    rate = torch.exp(torch.arange(0, d_model, 2, device=device, dtype=torch.float32) * (-math.log(10000.0) / d_model))
    angle = position[:, None] * rate
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


def sinusoids_in_halves(length: int, d_model: int, offset: int = 0, device: torch.device | None = None) -> Tensor:
    """All sines, then all cosines, of the angles pos / 10000^(i / (D/2 - 1)): `(length, D)`.

    The variant in tensor2tensor, fairseq and Whisper; the slowest angle is exactly pos / 10000."""
    position = torch.arange(offset, offset + length, device=device, dtype=torch.float32)
    half = d_model // 2
    step = math.log(10000.0) / max(half - 1, 1)
    angle = position[:, None] * torch.exp(torch.arange(half, device=device, dtype=torch.float32) * -step)
    return torch.cat([angle.sin(), angle.cos()], dim=1)


SINUSOIDS = {"sinusoidal": sinusoids, "sinusoidal_halves": sinusoids_in_halves}


class Positions(nn.Module):
    """Scales the input `(B, L, D)` of an encoder or decoder, adds positions, and applies dropout.

    Rotary positions are instead applied in the attention, by `rotate`."""

    def __init__(self, config: ModelConfig, kind: str | None = None):
        super().__init__()
        self.kind = kind or config.positions
        self.first = config.first_position
        self.scale = math.sqrt(config.d_model) if config.scale_embedding else 1.0
        self.dropout = Dropout(config.dropout)
        if self.kind == "learned":
            self.table = nn.Embedding(config.max_positions, config.d_model)
            nn.init.normal_(self.table.weight, std=0.02)
        elif self.kind in SINUSOIDS:
            self.cached = torch.empty(0, config.d_model)  # not a buffer: its length may differ between processes

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """`x (B, L, D)` at positions from `offset` on. Raises ValueError past the end of a learned table."""
        x = x * self.scale
        if self.kind != "rotary":
            x = x + self.vectors(offset, offset + x.shape[1], x.device).to(x.dtype)
        return self.dropout(x)

    def vectors(self, first: int, end: int, device: torch.device) -> Tensor:
        """The vectors added at the positions from `first` up to, but not including, `end`: `(end - first, D)`."""
        if torch.compiler.is_exporting():  # the length is not known yet, so no table is made
            if self.kind == "learned":
                return self.table(torch.arange(first, end, device=device))
            return SINUSOIDS[self.kind](end - first, self.cached.shape[1], self.first + first, device)
        if self.kind == "learned":
            if end > self.table.num_embeddings:
                raise ValueError(f"{end} positions are more than model.max_positions={self.table.num_embeddings}")
            return self.table.weight[first:end]
        table = self.cached  # a local reference: another thread may replace the table
        if end > len(table) or table.device != device:
            table = self.cached = SINUSOIDS[self.kind](max(1000, 2 * end), table.shape[1], self.first, device)
        return table[first:end]


def rotate(x: Tensor, positions: Tensor | None = None) -> Tensor:
    """Rotates pair i of `x (B, H, L, d_k)` by pos / 10000^(2i/d_k): Q Kᵀ then depends only on distances.

    `positions (L,)` None: 0 to L - 1."""
    half = x.shape[-1] // 2
    if positions is None:
        positions = torch.arange(x.shape[-2], device=x.device)
    angle = rotary_angles(positions, x.shape[-1])
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def rotary_angles(positions: Tensor, key_dim: int) -> Tensor:
    """The angles by which `rotate` rotates the pairs of queries and keys at `positions (L,)`: `(L, d_k / 2)`."""
    half = key_dim // 2
    return positions[:, None] * 10000.0 ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
