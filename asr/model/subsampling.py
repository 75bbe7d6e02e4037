"""The input layers of the encoder. For audio, convolutional subsampling to fewer, wider frames.

Over time and frequency (Dong et al. 2018, Speech-Transformer), or over time only, as in Whisper (Radford et al. 2022)
and fairseq's S2T (Wang et al. 2020). For sequences with a low frame rate, a linear layer; for text, an embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asr.model.autocast import to_autocast_dtype
from asr.model.config import ModelConfig
from asr.model.masks import length_mask

# (kernel, stride) of each convolution over time and frequency
CONVOLUTIONS = {
    2: ((3, 2), (3, 1)),
    4: ((3, 2), (3, 2)),
    6: ((3, 2), (5, 3)),
    8: ((3, 2), (3, 2), (3, 2)),
}
# output frames: longer audio is subsampled in parts, because it is 30 times as large between the convolutions
PART = 1000


class ConvSubsampling(nn.Module):
    """X `(B, T, d)` -> `(B, T / factor, D)`. Nothing is padded: an output frame sees only real frames."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.factor = config.subsampling
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
    def reach(self) -> int:
        """The number of frames that one output frame sees."""
        reach = 1
        for kernel, stride in reversed(self.shapes):
            reach = (reach - 1) * stride + kernel
        return reach

    @property
    def centre(self) -> float:
        """The middle of the frames that the first output frame sees; 0 is the middle of the first frame."""
        return (self.reach - 1) / 2

    @property
    def dtype(self) -> torch.dtype:
        return self.convolutions[0].weight.dtype

    def forward(self, X: Tensor, X_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Frames and lengths after subsampling; an utterance shorter than one output frame has length 0."""
        if X.shape[1] < self.reach:
            X = nn.functional.pad(X, (0, 0, 0, self.reach - X.shape[1]))
        if torch.is_grad_enabled() or X.shape[1] <= PART * self.factor:
            return self._subsample(X), self.output_lens(X_lens)
        # each part extends into the next one as far as its last output frame sees
        begins = range(0, X.shape[1] - self.reach + 1, PART * self.factor)
        parts = [X[:, begin : begin + (PART - 1) * self.factor + self.reach] for begin in begins]
        return torch.cat([self._subsample(part) for part in parts], dim=1), self.output_lens(X_lens)

    def _subsample(self, X: Tensor) -> Tensor:
        first, *others = self.convolutions
        # for a single input channel cuDNN's kernels take twice as long as this product, and oneDNN's a tenth less
        x = product_with_windows(to_autocast_dtype(X), first) if X.is_cuda else first(X.unsqueeze(1))
        for layer in others:
            x = layer(x)
        return self.output(x.permute(0, 2, 3, 1).flatten(2))

    def output_lens(self, lens: Tensor) -> Tensor:
        """Lengths after subsampling, given the lengths `(B,)` before it."""
        for kernel, stride in self.shapes:
            lens = torch.div(lens - kernel, stride, rounding_mode="floor") + 1
        return lens.clamp(min=0)


def product_with_windows(X: Tensor, convolution: nn.Conv2d) -> Tensor:
    """A convolution with one input channel, X `(B, T, d)` -> `(B, C, T', d')` in channels-last, as the product of X's
    windows with the weights. A 3 x 3 window gets another row and column, with weights of zero: a GPU multiplies these
    16 numbers in a third of the time that it needs for 9."""
    (height, width), (down, right) = convolution.kernel_size, convolution.stride
    bottom, side = height % 2, width % 2
    X, weight = (nn.functional.pad(x, (0, side, 0, bottom)) for x in (X, convolution.weight))
    windows = X.unfold(1, height + bottom, down).unfold(2, width + side, right).flatten(3)
    return nn.functional.linear(windows, weight.flatten(1), convolution.bias).permute(0, 3, 1, 2)


class Conv1dSubsampling(nn.Module):
    """X `(B, T, d)` -> `(B, T / factor, D)` by two convolutions over time, padded with zeros by half their kernels.

    As in the original models: kernel 3, strides 1 and 2, GELU (Whisper); kernel 5, strides 2 and 2, GLU with
    `subsampling_channels` before it (S2T). Padding is zeroed before each convolution, as for an utterance by itself.
    """

    centre = 0.0

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.factor = config.subsampling
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
        x, lens = X.transpose(1, 2), X_lens
        for convolution, stride in zip(self.convolutions, self.strides, strict=True):
            x = convolution(x.masked_fill(length_mask(lens, x.shape[2])[:, 0], 0.0))
            x = nn.functional.glu(x, dim=1) if self.gated else nn.functional.gelu(x)
            lens = _strided(lens, stride)
        return x.transpose(1, 2), lens

    def output_lens(self, lens: Tensor) -> Tensor:
        """Lengths after subsampling, given the lengths `(B,)` before it."""
        for stride in self.strides:
            lens = _strided(lens, stride)
        return lens


def _strided(lens: Tensor, stride: int) -> Tensor:
    return torch.div(lens - 1, stride, rounding_mode="floor") + 1


class LinearSubsampling(nn.Module):
    """X `(B, T, d)` -> `(B, T, D)`, each frame separately."""

    factor, centre = 1, 0.0

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.output = nn.Linear(config.input_dim, config.d_model)

    @property
    def dtype(self) -> torch.dtype:
        return self.output.weight.dtype

    def forward(self, X: Tensor, X_lens: Tensor) -> tuple[Tensor, Tensor]:
        return self.output(X), X_lens

    def output_lens(self, lens: Tensor) -> Tensor:
        return lens


class TokenEmbedding(nn.Module):
    """Token ids X `(B, T)` -> `(B, T, D)`, with the decoder's vocabulary but its own table."""

    factor, dtype = 1, torch.int64

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.table.weight, std=config.d_model**-0.5)

    def forward(self, X: Tensor, X_lens: Tensor) -> tuple[Tensor, Tensor]:
        return self.table(X), X_lens

    def output_lens(self, lens: Tensor) -> Tensor:
        return lens


SUBSAMPLERS = {
    "conv2d": ConvSubsampling,
    "conv1d": Conv1dSubsampling,
    "conv1d_glu": Conv1dSubsampling,
    "linear": LinearSubsampling,
    "embedding": TokenEmbedding,
}
