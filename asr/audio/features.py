"""Features: from waveforms to normalised log-mel filterbanks, in batches, on the model's device.

A frame is computed from real samples only (no padding at the edges), so that the length of the batch never changes it.
Whisper's features, which do pad, and Kaldi's are there for models that were trained on them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from asr.audio._torchaudio import kaldi, transforms
from asr.audio.config import FeatureConfig
from asr.audio.reading import SAMPLE_RATE

LOG_FLOOR = 1e-6
SILENCE = 1e-3  # peak below which there is nothing to hear (-60 dB of full scale)
QUIET = 0.03  # amplitude to which quieter audio is raised
BLOCK, CLICK = 160, 6  # samples per block in which the amplitude is measured, and blocks that speech is longer than
LOWEST_HERTZ = 20.0  # lowest frequency of log_mel
SMALLEST_STD = 1e-3


class FrontEnd(nn.Module):
    """Turns audio `(B, N)` or matrices `(B, T, d)` into normalised features `(B, T, d)`, whose padding frames are zero.
    Token ids `(B, T)` stay as they are.

    The normalisation is a pair of buffers, `mean` and `std` `(d,)`, so it travels with the model.
    """

    def __init__(self, config: FeatureConfig):
        super().__init__()
        self.config = config
        self.register_buffer("mean", torch.zeros(config.dim))
        self.register_buffer("std", torch.ones(config.dim))
        whole = int if config.kind == "kaldi" else round  # Kaldi truncates
        self.window, self.hop = (whole(SAMPLE_RATE * ms * 0.001) for ms in (config.window_ms, config.hop_ms))
        if config.kind in ("log_mel", "whisper"):
            whisper = config.kind == "whisper"
            self.stft = transforms.Spectrogram(self.window, hop_length=self.hop, power=None, center=whisper)
            scale = {"f_min": 0.0, "norm": "slaney", "mel_scale": "slaney"} if whisper else {"f_min": LOWEST_HERTZ}
            self.mel_scale = transforms.MelScale(config.dim, SAMPLE_RATE, n_stft=self.window // 2 + 1, **scale)
            for owner, name in ((self.stft, "window"), (self.mel_scale, "fb")):  # derived from the config: not saved
                owner._non_persistent_buffers_set.add(name)

    @property
    def centre(self) -> float:
        """Seconds from the start of the audio to the middle of the first frame."""
        if self.config.kind == "whisper":
            return 0.0
        return (self.config.hop_ms if self.config.kind == "matrix" else self.config.window_ms) / 2000

    @property
    def hertz(self) -> Tensor | None:
        """The centre frequency of each band of log_mel, `(d,)`; None for the other kinds."""
        if self.config.kind != "log_mel":
            return None
        low, high = (2595 * math.log10(1 + hertz / 700) for hertz in (LOWEST_HERTZ, SAMPLE_RATE / 2))
        mel = torch.linspace(low, high, self.config.dim + 2, device=self.mean.device)[1:-1]
        return 700 * (10 ** (mel / 2595) - 1)

    def forward(self, inputs: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        """`inputs` `(B, N)` samples or `(B, T, d)`, `lens` `(B,)` in samples or frames -> X `(B, T, d)`, X_lens."""
        if self.config.kind == "text":
            return inputs, lens
        X, X_lens = self.extract(inputs, lens)
        padding = torch.arange(X.shape[1], device=X.device)[None, :, None] >= X_lens[:, None, None]
        mean, std = self.mean, self.std
        if self.config.normalization != "global":
            count = X_lens.clamp(min=1)[:, None, None]
            mean = X.masked_fill(padding, 0.0).sum(dim=1, keepdim=True) / count
            if self.config.normalization == "cmvn":
                std = ((X - mean).masked_fill(padding, 0.0).square().sum(dim=1, keepdim=True) / count).sqrt()
                std = std.clamp(min=SMALLEST_STD)
        return ((X - mean) / std).masked_fill(padding, 0.0), X_lens

    def extract(self, inputs: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        """The features before normalisation, and their lengths; float32 even under autocast."""
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            return self._extract(inputs, lens)

    def _extract(self, inputs: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        if self.config.kind == "matrix":
            if inputs.ndim != 3 or inputs.shape[2] != self.config.dim:
                shape = tuple(inputs.shape)
                raise ValueError(f"this model reads feature matrices (B, T, {self.config.dim}), not {shape}")
            return inputs, lens
        if self.config.kind == "whisper":
            return self._whisper(inputs, lens)
        if inputs.shape[1] < self.window:
            inputs = nn.functional.pad(inputs, (0, self.window - inputs.shape[1]))
        if self.config.kind == "kaldi":
            X = torch.stack([self._kaldi(samples) for samples in inputs])
        else:
            floor = LOG_FLOOR
            if self.config.normalization != "global":  # the mean cancels a gain: as good as one before the floor
                floor = (LOG_FLOOR / quiet_gain(inputs.detach(), lens).square())[:, :, None]
            X = self._mel_power(inputs).clamp_(min=floor).log_().transpose(1, 2)
        return X, self.output_lens(lens)

    def _mel_power(self, inputs: Tensor) -> Tensor:
        """`(B, N)` -> `(B, d, T)`."""
        spectrum = self.stft(inputs)
        power = spectrum.real.square() + spectrum.imag.square()  # four times as fast as abs() of complex numbers
        return self.mel_scale(power)

    def _whisper(self, inputs: Tensor, lens: Tensor) -> tuple[Tensor, Tensor]:
        """Log10 of the mel power of centred frames, at most 8 below the utterance's maximum, scaled to about [-1, 1]
        (Radford et al. 2022, section 2.2)."""
        shortest = max(self.window, round(self.config.pad_seconds * SAMPLE_RATE))
        inputs = nn.functional.pad(inputs, (0, max(0, shortest - inputs.shape[1])))
        X = self._mel_power(inputs)[:, :, :-1].clamp_(min=1e-10).log10_()
        X = torch.maximum(X, X.amax(dim=(1, 2), keepdim=True) - 8.0)
        return ((X + 4.0) / 4.0).transpose(1, 2), self.output_lens(lens)

    def _kaldi(self, samples: Tensor) -> Tensor:
        """Kaldi's filterbanks `(T, d)` of samples `(N,)`, without dither; Kaldi's samples have 16 bits."""
        timing = {"frame_length": self.config.window_ms, "frame_shift": self.config.hop_ms}
        return kaldi.fbank(samples[None] * 2**15, num_mel_bins=self.config.dim, sample_frequency=SAMPLE_RATE, **timing)

    def output_lens(self, lens: Tensor) -> Tensor:
        """The numbers of frames `(B,)` of `lens (B,)` samples (for matrices and texts, `lens` itself)."""
        if self.config.takes != "sound":
            return lens
        if self.config.kind == "whisper":
            shortest = round(self.config.pad_seconds * SAMPLE_RATE) // self.hop
            return torch.div(lens, self.hop, rounding_mode="floor").clamp(min=shortest)
        return torch.div(lens - self.window, self.hop, rounding_mode="floor").clamp(min=-1) + 1

    def set_statistics(self, mean: Tensor, std: Tensor) -> None:
        """Sets the normalisation: `(d,)` each; deviations are bounded from below."""
        self.mean.copy_(mean)
        self.std.copy_(std.clamp(min=SMALLEST_STD))


def quiet_gain(samples: Tensor, lens: Tensor | None = None) -> Tensor:
    """The gain `(B, 1)` that raises the amplitude of each row of `(B, N)`, of which `lens (B,)` samples count (None:
    all), to `QUIET`: 1 for louder rows, at most 30."""
    return QUIET / amplitude(samples, lens).clamp(SILENCE, QUIET)


def amplitude(samples: Tensor, lens: Tensor | None = None) -> Tensor:
    """The amplitude `(B, 1)` that all of the `CLICK` loudest blocks of each row of `(B, N)` reach, wherever its zero
    lies, of which `lens (B,)` samples count (None: all): neither a click nor an offset makes a quiet recording loud."""
    count = samples.shape[1] // BLOCK
    blocks = samples[:, : count * BLOCK].unflatten(1, (count, BLOCK))
    amplitudes = (blocks.amax(dim=2) - blocks.amin(dim=2)) / 2
    if lens is not None:  # an offset ends in the middle of a block
        amplitudes = amplitudes.masked_fill(torch.arange(count, device=lens.device) >= lens[:, None] // BLOCK, 0.0)
    amplitudes = nn.functional.pad(amplitudes, (0, CLICK))
    return amplitudes.topk(CLICK, dim=1).values[:, -1:]


class RunningStatistics:
    """Mean and standard deviation `(d,)` over all real frames of the batches passed to `update` (float64 sums).

    With utterance normalisation, the deviation is around each utterance's own mean."""

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
