"""Fully sharded training (Zhao et al. 2023, "PyTorch FSDP"): each process keeps its share of the weights, gradients and
optimiser states, and has a layer's weights whole only while it computes with them.

Checkpoints are those of any other training: whole, in one file.
"""

from __future__ import annotations

import warnings
from copy import deepcopy

import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from asr.model.attention import MultiHeadAttention
from asr.model.layers import layers_of


def fully_sharded(processes: int) -> ModelParallelStrategy:
    """Lightning's strategy for so many processes, whose module shards itself in `configure_model`."""
    return ModelParallelStrategy(processes, tensor_parallel_size=1, save_distributed_checkpoint=False)


class Sharded:
    """Shards `stack` with FSDP2, layer by layer. Every process must run the same forward passes through it."""

    def __init__(self, stack: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None):
        """`dtype`: what autocast multiplies in. A layer's weights are sent in it: autocast would make copies of its
        own, of whole weights, and keep them from the forward pass to the backward pass. So would attention's joint
        product of queries, keys and values, which is left out."""
        policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, cast_forward_inputs=False)
        self.copy = deepcopy(stack).eval()
        self.stack = stack
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # may return views, which nothing here writes to
        for parameter in stack.parameters():
            parameter.data = parameter.data.contiguous()  # convolutions have their channels last elsewhere
        for module in stack.modules():
            if isinstance(module, MultiHeadAttention):
                module.fuse_projections = False
        for module in (*layers_of(stack), stack):
            fully_shard(module, mesh=mesh, mp_policy=policy)

    def whole(self) -> nn.Module:
        """A copy that is not sharded, with the current weights: for validation, where each process does other work."""
        self.copy.load_state_dict(get_model_state_dict(self.stack, options=StateDictOptions(full_state_dict=True)))
        return self.copy.to(next(self.stack.parameters()).device)

    def shares(self) -> nn.Module:
        """Back to the sharded module; the copy goes to the CPU and makes room on the device."""
        self.copy.cpu()
        return self.stack


def whole_norm(norm: Tensor) -> Tensor:
    """A norm `()` of gradients, over the shares of all processes; each of them gets it."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
