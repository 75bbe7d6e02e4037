"""Layers laid out for inference in bfloat16 on a CPU, with oneDNN's fused kernels.

`nn.Linear` lays its weight out in oneDNN's blocks at every call, which for the few rows of a decoding step takes as
long as the product itself; here that is done once. An activation is computed where the result is written.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import NoReturn

import torch
from torch import Tensor, nn

from asr.model.attention import MultiHeadAttention
from asr.model.layers import TransformerDecoderLayer

ACTIVATIONS = {nn.ReLU: "relu", nn.GELU: "gelu", nn.SiLU: "swish"}  # as oneDNN calls them


class Packed(nn.Module):
    """A layer whose weights are laid out permanently. It has no gradients: oneDNN's operators would drop them."""

    def _refuse(self, *args, **kwargs) -> NoReturn:
        raise ValueError(
            "a model that decodes in bfloat16 or int8 on a CPU is packed, and cannot be saved, copied or differentiated"
            " any more: load its folder again, or decode with precision=float32"
        )

    _save_to_state_dict = __getstate__ = _refuse  # copying and pickling begin with the second

    def __call__(self, x: Tensor) -> Tensor:
        return self._refuse() if x.requires_grad else super().__call__(x)


class PackedLinear(Packed):
    """A linear layer with `weight (out, in)` and `bias (out,)`, followed by one of oneDNN's activations: from any
    type to bfloat16."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str = "none"):
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.bias = None if bias is None else bias.detach()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(torch.bfloat16)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, self.activation, [], "none")


class Together(nn.Module):
    """Several linear layers with the same input in one product: `linear` gives their outputs, concatenated."""

    def __init__(self, linear: Packed, widths: list[int]):
        super().__init__()
        self.linear, self.widths = linear, widths

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.linear(x).split(self.widths, dim=-1)


class PackedConv2d(Packed):
    """An `nn.Conv2d` with zero padding, followed by one of oneDNN's activations."""

    def __init__(self, conv: nn.Conv2d, activation: str):
        super().__init__()
        self.weight, self.bias = conv.weight.detach(), conv.bias.detach()
        self.shape = (conv.padding, conv.stride, conv.dilation, conv.groups)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._convolution_pointwise(
            x, self.weight, self.bias, *self.shape, self.activation, [], "none"
        )


def can_pack(device: torch.device) -> bool:
    """Whether oneDNN computes in bfloat16 on this device: on a CPU with AVX512 or better."""
    return (
        device.type == "cpu" and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def pack(model: nn.Module) -> nn.Module:
    """Packs the layers of a bfloat16 model in place: it is then for inference only, and can no longer be saved."""
    across = [layer.cross_attention for layer in model.modules() if isinstance(layer, TransformerDecoderLayer)]
    for attention in list(model.modules()):
        if isinstance(attention, MultiHeadAttention) and attention not in across and attention.fused is None:
            linears = attention.query, attention.key, attention.value
            biases = [x.weight.new_zeros(x.out_features) if x.bias is None else x.bias for x in linears]
            linear = PackedLinear(torch.cat([x.weight for x in linears]), torch.cat(biases))
            attention.fused = Together(linear, [x.out_features for x in linears])
            del attention.query, attention.key, attention.value
    for parent in list(model.modules()):
        names = [name for name, _ in parent.named_children()]
        for name, following in zip_longest(names, names[1:]):
            layer = getattr(parent, name)
            after = getattr(parent, following) if following and isinstance(parent, nn.Sequential) else None
            activation = ACTIVATIONS.get(type(after), "none")
            if type(layer) is nn.Linear:
                setattr(parent, name, PackedLinear(layer.weight, layer.bias, activation))
            elif type(layer) is nn.Conv2d and activation != "none":
                setattr(parent, name, PackedConv2d(layer, activation))
            else:
                continue
            if activation != "none":
                setattr(parent, following, nn.Identity())
    return model.requires_grad_(False)
