"""Low-rank adaptation of a trained model (LoRA, Hu et al. 2021): its weights stay as they are, and every linear layer
within the encoder's and the decoder's layers learns what is added to its own, the product of two thin matrices."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from asr.model.layers import layers_of

ORIGINAL = ".parametrizations.weight.original"  # what torch calls the weight that something is added to


class LowRank(nn.Module):
    """W + B A: `weight (out, in)` and the product of `up (out, rank)`, zero at first, and `down (rank, in)`."""

    def __init__(self, weight: Tensor, rank: int):
        super().__init__()
        self.up = nn.Parameter(weight.new_zeros(weight.shape[0], rank))
        self.down = nn.Parameter(weight.new_empty(rank, weight.shape[1]))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))  # as a linear layer begins

    def forward(self, weight: Tensor) -> Tensor:
        """`(out, in)`; under autocast in its type, in which less than a thousandth of the weight is hardly seen."""
        return torch.addmm(weight, self.up, self.down)


def add_low_rank(model: nn.Module, rank: int, trained: tuple[str, ...] = ()) -> None:
    """Gives each linear layer of the encoder's and decoder's layers its two matrices, in place, but for frozen ones. Of
    all else that is left to train what has a name that begins with one of `trained`."""
    linears = [m for layer in layers_of(model) for m in layer.modules() if isinstance(m, nn.Linear)]
    linears = [linear for linear in linears if linear.weight.requires_grad]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name.startswith(trained))
    for linear in linears:
        parametrize.register_parametrization(linear, "weight", LowRank(linear.weight, rank))


def merge_low_rank(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model that `add_low_rank` was given as those of one that it was not."""
    merged = {name: weight for name, weight in weights.items() if ".parametrizations." not in name}
    for name, weight in weights.items():
        if name.endswith(ORIGINAL):
            added = name.removesuffix("original") + "0."
            merged[name.removesuffix(ORIGINAL) + ".weight"] = weight + weights[f"{added}up"] @ weights[f"{added}down"]
    return merged
