"""Linear layers in whole numbers, for inference on a CPU: what comes in has eight bits, and so have the weights.

A layer norm, before its gain and bias, gives rows of mean 0 and variance 1, whatever it is given. One scale for all of
them is known beforehand, then: `STEPS` steps a standard deviation, and what lies beyond 6.4 deviations is cut off. Gain
and bias go into the linear layer that follows, each of whose rows has a scale of its own (symmetric, per channel; Jacob
et al. 2018). Of a feed-forward layer the second product follows the first in whole numbers; a hidden unit is taken as
normal, with its bias as the mean and the norm of its weights as the deviation.

A model some of whose features are always far out of the rest (large language models have such) would lose them: look at
its word errors with and without.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asr.decode.packing import ACTIVATIONS, Packed
from asr.model.attention import MultiHeadAttention
from asr.model.layers import ConvolutionModule, FeedForward, Residual, layers_of

STEPS, ZERO = 20, 128  # of a normalised row: 0 .. 255 are -6.4 .. 6.35 deviations
HIDDEN = 5.0  # deviations of the widest hidden unit that are told apart
LEAST = {"relu": 0.0, "gelu": -0.17, "swish": -0.279}  # what an activation gives is never less


class QuantizedNorm(Packed):
    """A layer norm without gain and bias, `(..., D)` to whole numbers of the same shape."""

    def __init__(self, norm: nn.LayerNorm, dtype: torch.dtype):
        super().__init__()
        self.shape, self.eps = norm.normalized_shape, norm.eps
        self.gain = torch.full(self.shape, STEPS, dtype=dtype)
        self.zero = torch.full(self.shape, ZERO, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        normalized = nn.functional.layer_norm(x, self.shape, self.gain, self.zero, self.eps)
        return normalized.round_().clamp_(0, 255).to(torch.uint8)


class QuantizedLinear(Packed):
    """A linear layer of whole numbers, each `scale` times how far it lies from `zero`, followed by an activation of
    oneDNN's; `gives` are the scale, the zero and the type of what comes out."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        zero: int,
        gives: tuple[float, int, torch.dtype],
        activation: str = "none",
    ):
        super().__init__()
        self.scales = weight.abs().amax(dim=1).clamp(min=1e-12) / 127
        whole = (weight / self.scales[:, None]).round().to(torch.int8)
        self.weight = torch.ops.onednn.qlinear_prepack(whole, None)
        self.zeros = torch.zeros(len(weight), dtype=torch.int64)
        self.bias = bias
        self.scale, self.zero, self.gives, self.activation = scale, zero, gives, activation

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight, self.scales, self.zeros, self.bias
        return torch.ops.onednn.qlinear_pointwise(
            x, self.scale, self.zero, *weight, *self.gives, self.activation, [], "none"
        )


class QuantizedTogether(QuantizedLinear):
    """Several linear layers of the same input in one product."""

    def __init__(self, weights: list[Tensor], biases: list[Tensor], dtype: torch.dtype):
        super().__init__(torch.cat(weights), torch.cat(biases), 1 / STEPS, ZERO, (1.0, 0, dtype))
        self.widths = [len(weight) for weight in weights]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return super().forward(x).split(self.widths, dim=-1)


def can_quantize(device: torch.device) -> bool:
    """Whether oneDNN multiplies eight bits there without overflow: on a CPU with AVX512-VNNI or AMX."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


@torch.no_grad()
def quantize(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The float32 model with the linear layers that follow a norm in whole numbers, in place; the others are to compute
    in `dtype`. For inference alone, and no longer to be saved."""
    for layer in layers_of(model):
        for name, residual in list(layer.named_children()):
            if isinstance(residual, Residual) and residual.norm_first:
                _quantize(getattr(layer, name.removesuffix("_residual")), residual.norm, name, dtype)
                residual.norm = QuantizedNorm(residual.norm, dtype)
    return model


def _quantize(sublayer: nn.Module, norm: nn.LayerNorm, name: str, dtype: torch.dtype) -> None:
    """The layers of `sublayer` that see what `norm` gives."""
    if isinstance(sublayer, FeedForward):
        first, activation, _, second = sublayer
        weight, bias = _with_norm(first, norm)
        kind = ACTIVATIONS[type(activation)]
        most = float((bias + HIDDEN * weight.norm(dim=1)).max())
        scale = (most - LEAST[kind]) / 255
        zero = round(-LEAST[kind] / scale)
        sublayer[0] = QuantizedLinear(weight, bias, 1 / STEPS, ZERO, (scale, zero, torch.uint8), kind)
        sublayer[1] = nn.Identity()
        sublayer[3] = QuantizedLinear(second.weight, second.bias, scale, zero, (1.0, 0, dtype))
    elif isinstance(sublayer, ConvolutionModule):
        sublayer.expand = _alone(sublayer.expand, norm, dtype)
    elif isinstance(sublayer, MultiHeadAttention) and name.startswith("cross"):
        sublayer.query = _alone(sublayer.query, norm, dtype)
    else:
        linears = (sublayer.query, sublayer.key, sublayer.value)
        sublayer.joint = QuantizedTogether(*zip(*(_with_norm(each, norm) for each in linears), strict=True), dtype)
        del sublayer.query, sublayer.key, sublayer.value


def _alone(linear: nn.Linear, norm: nn.LayerNorm, dtype: torch.dtype) -> QuantizedLinear:
    return QuantizedLinear(*_with_norm(linear, norm), 1 / STEPS, ZERO, (1.0, 0, dtype))


def _with_norm(linear: nn.Linear, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """The weight and bias of a linear layer that takes the norm's gain and bias upon itself."""
    bias = linear.weight @ norm.bias
    return linear.weight * norm.weight, bias if linear.bias is None else bias + linear.bias
