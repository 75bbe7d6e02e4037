"""Low-rank adaptation of a trained model (LoRA, Hu et al. 2021): its weights stay frozen, and every linear layer in the
encoder's and decoder's layers learns an update that is added to its weight, the product of two thin matrices."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from asr.model.layers import layers_of

ORIGINAL = ".parametrizations.weight.original"  # torch's name for a weight that an update is added to


class LowRank(nn.Module):
    """W + B A: `weight (out, in)` plus the product of `up (out, rank)`, initially zero, and `down (rank, in)`."""

    def __init__(self, weight: Tensor, rank: int):
        super().__init__()
        self.up = nn.Parameter(weight.new_zeros(weight.shape[0], rank))
        self.down = nn.Parameter(weight.new_empty(rank, weight.shape[1]))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))  # initialised like a linear layer

    def forward(self, weight: Tensor) -> Tensor:
        """The sum `(out, in)`; under autocast in its type, which hardly resolves a thousandth of the weight or less."""
        return torch.addmm(weight, self.up, self.down)


def add_low_rank(model: nn.Module, rank: int, trained: tuple[str, ...] = ()) -> None:
    """Adds two matrices to each linear layer in the encoder's and decoder's layers, except frozen ones, in place. Of
    all other parameters, only those whose names start with one of `trained` stay trainable.

    Raises ValueError for a rank that no product of the two can have."""
    linears = [m for layer in layers_of(model) for m in layer.modules() if isinstance(m, nn.Linear)]
    linears = [linear for linear in linears if linear.weight.requires_grad]
    most = min((size for linear in linears for size in linear.weight.shape), default=rank)
    if rank > most:
        raise ValueError(f"lora_rank={rank} is more than the rank of the model's matrices, {most}: train all weights")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and name.startswith(trained))
    for linear in linears:
        parametrize.register_parametrization(linear, "weight", LowRank(linear.weight, rank))


def merge_low_rank(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Converts the weights of a model with `add_low_rank` to those of the same model without it."""
    merged = {name: weight for name, weight in weights.items() if ".parametrizations." not in name}
    for name, weight in weights.items():
        if name.endswith(ORIGINAL):
            added = name.removesuffix("original") + "0."
            merged[name.removesuffix(ORIGINAL) + ".weight"] = weight + weights[f"{added}up"] @ weights[f"{added}down"]
    return merged
