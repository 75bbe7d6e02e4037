"""Augmentation on the fly: speed perturbation (Ko et al. 2015) of waveforms, vocal tract length perturbation (VTLP,
Jaitly & Hinton 2013) and SpecAugment (Park et al. 2019) of features."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from asr.audio._torchaudio import transforms
from asr.audio.config import SpecAugmentConfig
from asr.audio.reading import SAMPLE_RATE

FORMANTS_END = 4800.0  # Hz: up to here, frequencies scale with the vocal tract's length; above, they are bent back


class SpecAugment(nn.Module):
    """Changes the length of the vocal tract, then masks bands and time spans of normalised features with zero (their
    mean). Each utterance has its own length and masks."""

    def __init__(self, config: SpecAugmentConfig, hertz: Tensor | None = None):
        """`hertz (d,)`: the centre of each band. Raises ValueError if vocal tracts are to change and it is missing."""
        super().__init__()
        if config.vocal_tract and hertz is None:
            raise ValueError("spec_augment.vocal_tract works with features.kind=log_mel only")
        self.config = config
        self.register_buffer("hertz", hertz, persistent=False)

    def forward(self, X: Tensor, X_lens: Tensor) -> Tensor:
        """X `(B, T, d)`, X_lens `(B,)` -> augmented X; time masks are relative to each utterance's own length."""
        B, T, d = X.shape
        config = self.config
        if config.vocal_tract:
            lengths = 1 + config.vocal_tract * (2 * torch.rand(B, device=X.device) - 1)
            X = change_vocal_tract(X, self.hertz, lengths)
        all_bands = torch.full((B,), d, device=X.device)
        bands = self._spans(all_bands, torch.full_like(all_bands, config.freq_width), config.freq_masks, d)
        frames = self._spans(X_lens, (X_lens * config.time_ratio).long(), config.time_masks, T)
        return X.masked_fill(bands[:, None, :] | frames[:, :, None], 0.0)

    @staticmethod
    def _spans(lens: Tensor, widest: Tensor, count: int, size: int) -> Tensor:
        """`count` spans per row, each of width U(0, widest) and start U(0, len - width): `(B, size)`, True inside."""
        shape = (len(lens), count)
        width = torch.rand(shape, device=lens.device) * (widest[:, None] + 1)
        width = torch.minimum(width.floor(), lens[:, None])
        start = (torch.rand(shape, device=lens.device) * (lens[:, None] - width + 1)).floor()
        position = torch.arange(size, device=lens.device)
        inside = (position >= start[..., None]) & (position < (start + width)[..., None])
        return inside.any(dim=1)


def change_vocal_tract(X: Tensor, hertz: Tensor, lengths: Tensor) -> Tensor:
    """X `(B, T, d)`, whose bands are centred at `hertz (d,)`, as if from vocal tracts `lengths (B,)` times as long: a
    resonance at f moves to f / length, up to `FORMANTS_END`; above, frequencies are bent so that half the sample rate
    stays in place. Values between two bands are interpolated."""
    nyquist, lengths = SAMPLE_RATE / 2, lengths[:, None]
    end = FORMANTS_END * lengths.clamp(max=1)  # of the scaled range: before scaling and, divided by the length, after
    bent = nyquist - (nyquist - end) / (nyquist - end / lengths) * (nyquist - hertz)
    source = torch.where(hertz <= end / lengths, hertz * lengths, bent)  # (B, d): where each band's value comes from
    above = torch.searchsorted(hertz, source).clamp(1, len(hertz) - 1)
    share = ((source - hertz[above - 1]) / (hertz[above] - hertz[above - 1])).clamp(0, 1)
    above = above[:, None].expand(X.shape)
    return torch.lerp(X.gather(2, above - 1), X.gather(2, above), share[:, None].to(X.dtype))


@cache
def _resampler(hundredths: int, device: torch.device) -> transforms.Resample:
    """The resampler of a speed, cached because building its filter on a device makes the host wait."""
    return transforms.Resample(hundredths, 100).to(device)


def change_speed(samples: Tensor, lens: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Plays `(B, N)` samples, of which `lens (B,)` are real, `factor` times as fast (the pitch changes, too, as in sox
    `speed`): `(B, N / factor)`, padded with zeros, and the lengths. `factor` is rounded to hundredths."""
    hundredths = round(factor * 100)
    if hundredths == 100:
        return samples, lens
    with torch.autocast(samples.device.type, enabled=False):
        played = _resampler(hundredths, samples.device)(samples)
    lens = -(-lens * 100 // hundredths)
    position = torch.arange(played.shape[1], device=lens.device)
    return played.masked_fill(position >= lens[:, None], 0.0), lens
