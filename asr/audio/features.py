"""Features: waveforms to normalised log-mel filterbanks, in batches, on the device that the model is on.

A frame is computed from real samples alone (no padding at the edges), so that the length of the batch never changes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from asr.audio._torchaudio import transforms
from asr.audio.reading import SAMPLE_RATE

LOG_FLOOR = 1e-6


@dataclass(frozen=True)
class FeatureConfig:
    """What the front end computes; saved with the weights."""

    kind: str = "log_mel"  # log_mel: from sound; matrix: (T, d) as it is given
    dim: int = 80  # d: mel bands, or the width of the matrices
    window_ms: float = 25.0
    hop_ms: float = 10.0
    normalization: str = "global"  # global: mean and variance of the training set; utterance: its own mean instead

    def __post_init__(self):
        if self.kind not in ("log_mel", "matrix"):
            raise ValueError(f"features.kind: {self.kind!r} is not one of log_mel, matrix")
        if self.normalization not in ("global", "utterance"):
            raise ValueError(f"features.normalization: {self.normalization!r} is not one of global, utterance")
        if self.dim < 1 or self.hop_ms <= 0 or self.window_ms < self.hop_ms:
            raise ValueError("features: dim and hop_ms must be positive, window_ms at least hop_ms")

    @property
    def frames_per_second(self) -> float:
        return 1000 / self.hop_ms


class FrontEnd(nn.Module):
    """Sound `(B, N)` or matrices `(B, T, d)` to normalised features `(B, T, d)`; padding frames are zero.

    The normalisation is a pair of buffers `mean` and `std`, `(d,)`: it travels with the model.
    """

    def __init__(self, config: FeatureConfig):
        super().__init__()
        self.config = config
        self.register_buffer("mean", torch.zeros(config.dim))
        self.register_buffer("std", torch.ones(config.dim))
        self.window = round(config.window_ms * SAMPLE_RATE / 1000)
        self.hop = round(config.hop_ms * SAMPLE_RATE / 1000)
        if config.kind == "log_mel":
            self.stft = transforms.Spectrogram(self.window, hop_length=self.hop, power=None, center=False)
            self.mel_scale = transforms.MelScale(config.dim, SAMPLE_RATE, f_min=20.0, n_stft=self.window // 2 + 1)
            for owner, name in ((self.stft, "window"), (self.mel_scale, "fb")):  # derived from the config: not saved
                owner._non_persistent_buffers_set.add(name)

    def forward(self, inputs: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        """`inputs` `(B, N)` samples or `(B, T, d)`, `lens` `(B,)` in samples or frames -> X `(B, T, d)`, X_lens."""
        X, X_lens = self.extract(inputs, lens)
        padding = torch.arange(X.shape[1], device=X.device)[None, :, None] >= X_lens[:, None, None]
        mean = self.mean
        if self.config.normalization == "utterance":
            total = X.masked_fill(padding, 0.0).sum(dim=1, keepdim=True)
            mean = total / X_lens.clamp(min=1)[:, None, None]
        return ((X - mean) / self.std).masked_fill(padding, 0.0), X_lens

    @torch.autocast("cuda", enabled=False)
    @torch.autocast("cpu", enabled=False)
    def extract(self, inputs: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        """The features before normalisation, and their lengths; float32 also under autocast."""
        if self.config.kind == "matrix":
            if inputs.ndim != 3 or inputs.shape[2] != self.config.dim:
                shape = tuple(inputs.shape)
                raise ValueError(f"this model reads feature matrices (B, T, {self.config.dim}), not {shape}")
            return inputs, lens
        if inputs.shape[1] < self.window:
            inputs = nn.functional.pad(inputs, (0, self.window - inputs.shape[1]))
        spectrum = self.stft(inputs)
        power = spectrum.real.square() + spectrum.imag.square()  # four times as fast as abs() of complex numbers
        X = self.mel_scale(power).clamp_(min=LOG_FLOOR).log_().transpose(1, 2)
        return X, self.output_lens(lens)

    def output_lens(self, lens: Tensor) -> Tensor:
        """Frames `(B,)` of sounds of `lens (B,)` samples (or of matrices, as they are)."""
        if self.config.kind == "matrix":
            return lens
        return torch.div(lens - self.window, self.hop, rounding_mode="floor").clamp(min=-1) + 1

    def set_statistics(self, mean: Tensor, std: Tensor) -> None:
        """Sets the normalisation: `(d,)` each; deviations are bounded from below."""
        self.mean.copy_(mean)
        self.std.copy_(std.clamp(min=1e-3))


class RunningStatistics:
    """Mean and deviation `(d,)` over all real frames of the batches it is fed (float64 sums).

    With utterance normalisation the deviation is around each utterance's own mean."""

    def __init__(self, config: FeatureConfig):
        self.around_own_mean = config.normalization == "utterance"
        self.count, self.sum, self.squares = 0, torch.zeros(config.dim).double(), torch.zeros(config.dim).double()

    def update(self, X: Tensor, X_lens: Tensor) -> None:
        for x, n in zip(X, X_lens.tolist(), strict=True):
            x = x[:n].double()
            if self.around_own_mean and n:
                x = x - x.mean(dim=0)
            self.count += n
            self.sum += x.sum(dim=0)
            self.squares += x.square().sum(dim=0)

    def result(self) -> tuple[Tensor, Tensor]:
        mean = self.sum / max(self.count, 1)
        variance = (self.squares / max(self.count, 1) - mean.square()).clamp(min=0)
        return mean.float(), variance.sqrt().float()
