"""Convolutional subsampling: fewer, wider frames before the encoder.

Over time and frequency (Dong et al. 2018, Speech-Transformer), or over time alone, as Whisper (Radford et al. 2022) and
fairseq's S2T (Wang et al. 2020) do it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asr.model.config import ModelConfig

# (kernel, stride) of each convolution over time and frequency
CONVOLUTIONS = {
    2: ((3, 2), (3, 1)),
    4: ((3, 2), (3, 2)),
    6: ((3, 2), (5, 3)),
    8: ((3, 2), (3, 2), (3, 2)),
}


class ConvSubsampling(nn.Module):
    """X `(B, T, d)` -> `(B, T / factor, D)`. Nothing is padded: an output frame sees real frames alone."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.shapes = CONVOLUTIONS[config.subsampling]
        channels, width = 1, config.input_dim
        layers: list[nn.Module] = []
        for kernel, stride in self.shapes:
            layers += [nn.Conv2d(channels, config.subsampling_channels, kernel, stride), nn.ReLU()]
            channels, width = config.subsampling_channels, (width - kernel) // stride + 1
        if width < 1:
            raise ValueError(f"model.input_dim={config.input_dim} is too narrow to subsample by {config.subsampling}")
        self.convolutions = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        self.output = nn.Linear(channels * width, config.d_model)

    @property
    def dtype(self) -> torch.dtype:
        return self.convolutions[0].weight.dtype

    def forward(self, X: Tensor, X_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Frames and lengths after subsampling; an utterance shorter than one output frame has length 0."""
        shortest = 1
        for kernel, stride in reversed(self.shapes):
            shortest = (shortest - 1) * stride + kernel
        if X.shape[1] < shortest:
            X = nn.functional.pad(X, (0, 0, 0, shortest - X.shape[1]))
        x = self.convolutions(X.unsqueeze(1))
        x = self.output(x.permute(0, 2, 3, 1).flatten(2))
        return x, self.output_lens(X_lens)

    def output_lens(self, lens: Tensor) -> Tensor:
        """Lengths after subsampling, from lengths `(B,)` before it."""
        for kernel, stride in self.shapes:
            lens = torch.div(lens - kernel, stride, rounding_mode="floor") + 1
        return lens.clamp(min=0)


class Conv1dSubsampling(nn.Module):
    """X `(B, T, d)` -> `(B, T / factor, D)` by two convolutions over time, padded with zeros by half their kernels.

    As each checkpoint has it: kernel 3, strides 1 and 2, GELU (Whisper); kernel 5, strides 2 and 2, GLU with
    `subsampling_channels` before it (S2T). Nothing masks what lies between the convolutions: the last frame sees past
    its utterance's end what the padding became."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gated = config.subsampler == "conv1d_glu"
        kernel, self.strides = (5, (2, 2)) if self.gated else (3, (1, 2))
        between, widths = config.d_model, (config.d_model, config.d_model)
        if self.gated:
            between, widths = config.subsampling_channels // 2, (config.subsampling_channels, 2 * config.d_model)
        self.convolutions = nn.ModuleList(
            nn.Conv1d(before, width, kernel, stride, padding=kernel // 2)
            for before, width, stride in zip((config.input_dim, between), widths, self.strides, strict=True)
        )

    @property
    def dtype(self) -> torch.dtype:
        return self.convolutions[0].weight.dtype

    def forward(self, X: Tensor, X_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Frames and lengths after subsampling."""
        x = X.transpose(1, 2)
        for convolution in self.convolutions:
            x = convolution(x)
            x = nn.functional.glu(x, dim=1) if self.gated else nn.functional.gelu(x)
        return x.transpose(1, 2), self.output_lens(X_lens)

    def output_lens(self, lens: Tensor) -> Tensor:
        """Lengths after subsampling, from lengths `(B,)` before it."""
        for stride in self.strides:
            lens = torch.div(lens - 1, stride, rounding_mode="floor") + 1
        return lens


SUBSAMPLERS = {"conv2d": ConvSubsampling, "conv1d": Conv1dSubsampling, "conv1d_glu": Conv1dSubsampling}
