"""Augmentation on the fly: speed (Ko et al. 2015) on waveforms, SpecAugment (Park et al. 2019) on features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asr.audio._torchaudio import functional


@dataclass(frozen=True)
class SpecAugmentConfig:
    freq_masks: int = 2
    freq_width: int = 27  # F: widest frequency mask, in bands
    time_masks: int = 5
    time_ratio: float = 0.05  # widest time mask, as a part of the utterance

    def __post_init__(self):
        if min(self.freq_masks, self.freq_width, self.time_masks) < 0 or not 0 <= self.time_ratio <= 1:
            raise ValueError("spec_augment: counts and widths must not be negative, time_ratio lies in [0, 1]")


class SpecAugment(nn.Module):
    """Zeroes bands and stretches of normalised features (zero is their mean). Each utterance has masks of its own."""

    def __init__(self, config: SpecAugmentConfig):
        super().__init__()
        self.config = config

    def forward(self, X: Tensor, X_lens: Tensor) -> Tensor:
        """X `(B, T, d)`, X_lens `(B,)` -> X with masks; time masks are measured on each utterance's own length."""
        B, T, d = X.shape
        config = self.config
        all_bands = torch.full((B,), d, device=X.device)
        bands = self._spans(all_bands, torch.full_like(all_bands, config.freq_width), config.freq_masks, d)
        frames = self._spans(X_lens, (X_lens * config.time_ratio).long(), config.time_masks, T)
        return X.masked_fill(bands[:, None, :] | frames[:, :, None], 0.0)

    @staticmethod
    def _spans(lens: Tensor, widest: Tensor, count: int, size: int) -> Tensor:
        """`count` spans a row, each of width U(0, widest) at U(0, len - width): `(B, size)`, True = inside."""
        shape = (len(lens), count)
        width = torch.rand(shape, device=lens.device) * (widest[:, None] + 1)
        width = torch.minimum(width.floor(), lens[:, None])
        start = (torch.rand(shape, device=lens.device) * (lens[:, None] - width + 1)).floor()
        position = torch.arange(size, device=lens.device)
        inside = (position >= start[..., None]) & (position < (start + width)[..., None])
        return inside.any(dim=1)


def change_speed(samples: Tensor, lens: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Plays `(B, N)` samples of which `lens (B,)` are real `factor` times as fast (pitch changes too, as sox `speed`):
    `(B, N / factor)` with zeros for padding, and the lengths. `factor` is rounded to hundredths."""
    hundredths = round(factor * 100)
    if hundredths == 100:
        return samples, lens
    with torch.autocast(samples.device.type, enabled=False):
        played = functional.resample(samples, hundredths, 100)
    lens = -(-lens * 100 // hundredths)
    position = torch.arange(played.shape[1], device=lens.device)
    return played.masked_fill(position >= lens[:, None], 0.0), lens
