"""Fully sharded training (Zhao et al. 2023, "PyTorch FSDP"): each process keeps its share of the weights, gradients and
optimiser states, and holds a layer's full weights only while it computes with them.

Checkpoints are like those of any other training: full, in one file.
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
    """Lightning's strategy for this number of processes; the module shards itself in `configure_model`."""
    return ModelParallelStrategy(processes, tensor_parallel_size=1, save_distributed_checkpoint=False)


class Sharded:
    """Shards `stack` with FSDP2, layer by layer. Every process must run the same forward passes through it."""

    def __init__(self, stack: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None):
        """`dtype`: the type that autocast multiplies in. A layer's weights are sent in it: autocast would make its own
        copies of full weights and keep them from the forward pass to the backward pass. So would attention's joint
        product of queries, keys and values, which is therefore disabled."""
        policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, cast_forward_inputs=False)
        self.copy = deepcopy(stack).eval()
        self.stack = stack
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # may return views, which nothing here writes to
        for parameter in stack.parameters():
            parameter.data = parameter.data.contiguous()  # elsewhere convolutions are channels last
        for module in stack.modules():
            if isinstance(module, MultiHeadAttention):
                module.fuse_projections = False
        for module in (*layers_of(stack), stack):
            fully_shard(module, mesh=mesh, mp_policy=policy)

    def whole(self) -> nn.Module:
        """An unsharded copy with the current weights, for validation, in which each process does different work."""
        self.copy.load_state_dict(get_model_state_dict(self.stack, options=StateDictOptions(full_state_dict=True)))
        return self.copy.to(next(self.stack.parameters()).device)

    def shares(self) -> nn.Module:
        """The sharded module again; the copy moves to the CPU to make room on the device."""
        self.copy.cpu()
        return self.stack


def whole_norm(norm: Tensor) -> Tensor:
    """A gradient norm `()` over the shares of all processes, on each of them."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
