"""Distortion on the fly, on the device: rooms, noise, other voices, narrow bands, clipping.

A model that has only heard studio recordings understands nothing else (Ko et al. 2017, "A study on data augmentation of
reverberant speech for robust speech recognition", for simulated rooms). No files are read: rooms and noise are random,
voices are taken from the batch.
"""

from __future__ import annotations

import math
from dataclasses import fields

import torch
from torch import Tensor, nn

from asr.audio._torchaudio import functional
from asr.audio.config import DistortionConfig
from asr.audio.reading import SAMPLE_RATE

LEVEL_FLOOR = 1e-5
LONGEST_ECHO = 0.6  # seconds
EDGE = 25.0  # Hz over which a filter's gain falls in the steepest part of its slope


class Distortion(nn.Module):
    """Distorts some of the utterances of a batch; speech keeps its level, and padding stays zero.

    Which utterances, and how strongly, is drawn from torch's generator on the CPU, so the host never waits for the
    device. Everything as long as the audio is computed on the device."""

    def __init__(self, config: DistortionConfig):
        super().__init__()
        self.config = config

    def forward(self, samples: Tensor, lens: Tensor) -> Tensor:
        """`samples (B, N)` at 16 kHz, of which `lens (B,)` are real -> `(B, N)`."""
        clean = samples
        for each in fields(self.config):
            chosen = (torch.rand(len(samples)) < getattr(self.config, each.name)).nonzero()[:, 0]
            if not len(chosen) or (each.name == "voices" and len(samples) < 2):
                continue
            rows = chosen.to(samples.device, non_blocking=True)
            x, own_lens = samples[rows], lens[rows]
            if each.name == "voices":
                others = (chosen + torch.randint(1, len(samples), chosen.shape)) % len(samples)
                others = others.to(samples.device, non_blocking=True)
                y = add_voice(x, own_lens, clean[others], lens[others])
            else:
                y = EFFECTS[each.name](x, own_lens)
            real = torch.arange(x.shape[1], device=x.device) < own_lens[:, None]
            samples = samples.index_copy(0, rows, y.masked_fill(~real, 0.0).to(samples.dtype))
        return samples


def add_room(x: Tensor, lens: Tensor) -> Tensor:
    """Adds an echo: noise that decays by 60 dB within 0.1 to 0.6 s, 0 to 12 dB below the direct sound."""
    t = torch.arange(round(LONGEST_ECHO * SAMPLE_RATE), device=x.device) / SAMPLE_RATE
    seconds = _uniform(x, 0.1, LONGEST_ECHO)
    echo = torch.randn(len(x), len(t), device=x.device) * torch.exp(-math.log(1000) * t / seconds)
    echo = echo * (t > 0.002)  # the nearest wall is that far away
    echo = echo / echo.norm(dim=1, keepdim=True) * 10 ** (-_uniform(x, 0, 12) / 20)
    echo[:, 0] = 1.0
    return reverberate(x, lens, echo)


def reverberate(x: Tensor, lens: Tensor, responses: Tensor) -> Tensor:
    """Convolves `x (B, N)` with the impulse `responses (B, M)` of rooms and keeps its level."""
    N = x.shape[1]
    size = _fft_size(N + responses.shape[1])
    y = torch.fft.irfft(torch.fft.rfft(x.float(), size) * torch.fft.rfft(responses, size), size)[:, :N]
    return y * level(x, lens) / level(y, lens)


def add_noise(x: Tensor, lens: Tensor) -> Tensor:
    """Adds stationary noise whose power falls with frequency by an exponent between 0 (white) and 2 (brown)."""
    B, N = x.shape
    size = _fft_size(N)
    slope = torch.arange(1, size // 2 + 2, device=x.device) ** (-_uniform(x, 0, 2) / 2)
    spectrum = torch.fft.rfft(torch.randn(B, N, device=x.device), size) * slope
    return mix(x, lens, torch.fft.irfft(spectrum, size)[:, :N], lens, _uniform(x, 5, 25))


def add_voice(x: Tensor, lens: Tensor, other: Tensor, other_lens: Tensor) -> Tensor:
    """Adds other utterances `(B, N)`, of which `other_lens (B,)` samples are real, below the level of `x`."""
    return mix(x, lens, other, other_lens, _uniform(x, 5, 20))


def narrow(x: Tensor, lens: Tensor) -> Tensor:
    """Limits half of the utterances to 300 to 3,400 Hz in 8-bit mu-law, low-passes the others at 2 to 6 kHz."""
    N = x.shape[1]
    size = _fft_size(N)
    hertz = torch.arange(size // 2 + 1, device=x.device) * SAMPLE_RATE / size
    telephone = _uniform(x, 0, 1) < 0.5
    low = torch.where(telephone, 300.0, -torch.inf)
    high = torch.where(telephone, 3400.0, _uniform(x, 2000, 6000))
    gain = torch.sigmoid((hertz - low) / EDGE) * torch.sigmoid((high - hertz) / EDGE)
    y = torch.fft.irfft(torch.fft.rfft(x.float(), size) * gain, size)[:, :N]
    return torch.where(telephone, mu_law(y), y)


def mu_law(x: Tensor) -> Tensor:
    """Encodes in 8-bit mu-law (ITU-T G.711's curve) and decodes; the loudest sample of each row is full scale."""
    peak = x.abs().amax(dim=1, keepdim=True).clamp(min=LEVEL_FLOOR)
    return peak * functional.mu_law_decoding(functional.mu_law_encoding(x / peak, 256), 256)


def clip(x: Tensor, lens: Tensor) -> Tensor:
    """Clips at 0.8 to 3 times the root mean square."""
    most = level(x, lens) * _uniform(x, 0.8, 3.0)
    return torch.minimum(torch.maximum(x, -most), most)


EFFECTS = {"room": add_room, "noise": add_noise, "band": narrow, "clip": clip}


def mix(x: Tensor, lens: Tensor, other: Tensor, other_lens: Tensor, decibels: Tensor) -> Tensor:
    """Adds `other` to `x`, `decibels (B, 1)` below its level."""
    return x + other * 10 ** (-decibels / 20) * level(x, lens) / level(other, other_lens)


def level(x: Tensor, lens: Tensor) -> Tensor:
    """Returns the root mean square of the real samples, `(B, 1)`."""
    real = torch.arange(x.shape[1], device=x.device) < lens[:, None]
    mean = x.float().square().masked_fill(~real, 0.0).sum(dim=1) / lens.clamp(min=1)
    return mean.sqrt().clamp(min=LEVEL_FLOOR)[:, None]


def _uniform(x: Tensor, low: float, high: float) -> Tensor:
    """Draws a number between `low` and `high` for each utterance of `x (B, N)` on the CPU: `(B, 1)`."""
    return (low + (high - low) * torch.rand(len(x), 1)).to(x.device, non_blocking=True)


def _fft_size(length: int) -> int:
    """Returns the next length with small prime factors: FFTs of other lengths take several times as long."""
    return min(m * 2 ** max(0, math.ceil(math.log2(length / m))) for m in (1, 3, 5, 9, 15))
