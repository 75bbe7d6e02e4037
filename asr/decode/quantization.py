"""Linear layers in integers, for inference on a CPU: inputs and weights have eight bits.

A layer norm, before its gain and bias, gives rows of mean 0 and variance 1, whatever its input. So their scale is known
beforehand: `STEPS` steps per standard deviation, 128 to either side, and values farther out are clipped. A feature with
smaller weights in the layers that follow has fewer and wider steps (as in SmoothQuant, Xiao et al. 2023, but from the
weights only): in some models such features lie far out. Gain, bias and steps are folded into the linear layer that
follows, each of whose rows has its own scale (symmetric, per channel; Jacob et al. 2018). The second product of a
feed-forward layer is in integers, too; the range of a hidden unit is estimated as if it were normally distributed, with
its bias as the mean and the norm of its weights as the standard deviation.

No activations are measured, so a model may have outliers that are clipped: compare its word errors with and without.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from asr.decode.packing import ACTIVATIONS, Packed, Together
from asr.model.feed_forward import FeedForward
from asr.model.layers import ConvolutionModule, Residual, layers_of

WHOLE = 1.5 * 2**23  # adding a small number in single precision leaves that number, rounded, in the lowest bits
STEPS, ZERO = 24, 128  # of a feature with large weights: 0 .. 255 are -5.33 .. 5.29 standard deviations
HIDDEN = 5.0  # standard deviations of the widest hidden unit that the range covers
LEAST = {"relu": 0.0, "gelu": -0.17, "swish": -0.279}  # lower bounds of the activations


class QuantizedNorm(Packed):
    """A layer norm in `steps (D,)` per standard deviation: `(..., D)` -> `(..., D)`, uint8."""

    def __init__(self, norm: nn.LayerNorm, steps: Tensor):
        super().__init__()
        self.shape, self.eps = norm.normalized_shape, norm.eps
        self.gain, self.bias = steps, torch.full_like(steps, WHOLE + ZERO)

    def forward(self, x: Tensor) -> Tensor:
        rounded = nn.functional.layer_norm(x.float(), self.shape, self.gain, self.bias, self.eps)
        return rounded.clamp_(WHOLE, WHOLE + 255).view(torch.int32).to(torch.uint8)


class QuantizedLinear(Packed):
    """A linear layer with integer inputs, which stand for `scale` times their distance from `zero`, followed by one of
    oneDNN's activations; `gives` are the scale, the zero point and the type of the output."""

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


def can_quantize(device: torch.device) -> bool:
    """Whether oneDNN multiplies 8-bit integers on this device without overflow: on a CPU with AVX512-VNNI or AMX."""
    return device.type == "cpu" and torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


@torch.no_grad()
def quantize(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Quantises the linear layers of a float32 model that follow a norm, in place. Attention and the other layers
    compute in `dtype`, but norms and the residual stream in float32, in which torch is twice as fast at them as in
    bfloat16. The model is then for inference only, and can no longer be saved."""
    for layer in layers_of(model):
        for name, residual in list(layer.named_children()):
            if isinstance(residual, Residual) and residual.norm_first:
                sublayer = getattr(layer, name.removesuffix("_residual"))
                linears = _behind(sublayer, name)
                steps = _steps(linears, residual.norm)
                _quantize(sublayer, [_with_norm(linear, residual.norm, steps) for linear in linears], steps, dtype)
                residual.norm = QuantizedNorm(residual.norm, steps)
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    exact = [copy.deepcopy(norm.state_dict()) for norm in norms]
    model.to(dtype)
    for norm, parameters in zip(norms, exact, strict=True):
        norm.float().load_state_dict(parameters)
    return model.requires_grad_(False)


def _behind(sublayer: nn.Module, name: str) -> list[nn.Linear]:
    """The linear layers whose input is the output of the norm before `sublayer`."""
    if isinstance(sublayer, FeedForward):
        return [sublayer[0]]
    if isinstance(sublayer, ConvolutionModule):
        return [sublayer.expand]
    return [sublayer.query] if name.startswith("cross") else [sublayer.query, sublayer.key, sublayer.value]


def _steps(linears: list[nn.Linear], norm: nn.LayerNorm) -> Tensor:
    """Steps per standard deviation of each feature, `(D,)`: fewer for one with smaller weights than most."""
    influence = torch.cat([linear.weight for linear in linears]).norm(dim=0) * norm.weight.abs()
    return STEPS * (influence / influence.quantile(0.9).clamp(min=1e-12)).clamp(0.02, 1.0)


def _quantize(sublayer: nn.Module, folded: list[tuple[Tensor, Tensor]], steps: Tensor, dtype: torch.dtype) -> None:
    """Quantises the linear layers of `sublayer` that directly follow the norm; `folded` are their weights and biases
    with the norm folded in. In a feed-forward layer the second linear layer is quantised, too."""
    if isinstance(sublayer, FeedForward):
        (weight, bias), kind, second = folded[0], ACTIVATIONS[type(sublayer[1])], sublayer[3]
        most = max(float((bias + HIDDEN * (weight * steps).norm(dim=1)).max()), 1e-3)  # positive for a dead layer, too
        scale = (most - LEAST[kind]) / 255
        zero = round(-LEAST[kind] / scale)
        sublayer[0] = QuantizedLinear(weight, bias, 1.0, ZERO, (scale, zero, torch.uint8), kind)
        sublayer[1] = nn.Identity()
        sublayer[3] = QuantizedLinear(second.weight, second.bias, scale, zero, (1.0, 0, torch.float32))
    elif isinstance(sublayer, ConvolutionModule):
        sublayer.expand = QuantizedLinear(*folded[0], 1.0, ZERO, (1.0, 0, torch.float32))
    elif len(folded) == 1:
        sublayer.query = QuantizedLinear(*folded[0], 1.0, ZERO, (1.0, 0, dtype))
    else:
        weights, biases = zip(*folded, strict=True)
        linear = QuantizedLinear(torch.cat(weights), torch.cat(biases), 1.0, ZERO, (1.0, 0, dtype))
        sublayer.fused = Together(linear, [len(weight) for weight in weights])
        del sublayer.query, sublayer.key, sublayer.value


def _with_norm(linear: nn.Linear, norm: nn.LayerNorm, steps: Tensor) -> tuple[Tensor, Tensor]:
    """The weight and bias of a linear layer, for inputs in steps, with the norm's gain and bias folded in."""
    bias = linear.weight @ norm.bias
    return linear.weight * (norm.weight / steps), bias if linear.bias is None else bias + linear.bias
