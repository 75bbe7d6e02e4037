"""Dropout (Srivastava et al. 2014), with masks that are cheap on a CPU and in compiled layers.

torch draws Bernoulli numbers on one thread, which takes a quarter of a training step on a CPU. On a CPU the masks come
from numpy's SFC64 instead, one byte per element. The code that torch.compile generates runs ten rounds of Philox for
each element, which takes a GPU longer than reading the element, and stores the mask for the backward pass. In compiled
layers the masks are instead a hash of the element's index, which the backward pass recomputes. Both are seeded from
torch's generators, so `torch.manual_seed` makes them reproducible, too.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import relu

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Dropout(nn.Module):
    """Zeroes elements with probability `p` and scales the rest by 1 / (1 - p); the identity in evaluation.

    On a CPU `p` is rounded to a multiple of 1/256 and the scale adjusted to keep the expectation, as far as the type
    can represent the scale (to 0.1 % in bfloat16)."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return _drop(x, self.p) if self._drops else x

    def of_relu(self, x: Tensor) -> Tensor:
        """dropout(relu(x)), which saves only its result for the backward pass: zero elements have no gradient."""
        if self._drops and not torch.compiler.is_compiling():  # torch.compile decides for itself what to save
            return _DroppedReLU.apply(x, self.p)
        return self(relu(x))

    @property
    def _drops(self) -> bool:
        return self.training and self.p > 0

    def extra_repr(self) -> str:
        return f"p={self.p}"


class _DroppedReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, p: float) -> Tensor:
        y = _drop(relu(x), p)
        ctx.save_for_backward(y)
        ctx.scale = _cpu_scale(_threshold(p, x.dtype), x.dtype) if x.device.type == "cpu" else 1 / (1 - p)
        return y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(gradient, y, 0) * ctx.scale, None


def _drop(x: Tensor, p: float) -> Tensor:
    if torch.compiler.is_compiling():
        return torch.where(hashed_mask(x.shape, p, x.device), x * (1 / (1 - p)), 0.0)
    return x * cpu_dropout_mask(x.shape, p, x.dtype) if x.device.type == "cpu" else nn.functional.dropout(x, p)


def hashed_mask(shape: torch.Size, p: float, device: torch.device) -> Tensor:
    """False with probability `p`, from 31 bits of Wellons' lowbias32 hash of the index, with two random numbers."""
    seeds = torch.randint(2**31 - 1, (2,), dtype=torch.int32, device=device)
    x = torch.arange(shape.numel(), dtype=torch.int32, device=device).view(shape) ^ seeds[0]
    x = (x ^ _shifted(x, 16)) * 0x7FEB352D + seeds[1]
    x = (x ^ _shifted(x, 15)) * (0x846CA68B - 2**32)
    x = x ^ _shifted(x, 16)
    return (x & (2**31 - 1)) >= int(p * 2**31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int32: zeros are shifted in."""
    return (x >> bits) & (2 ** (32 - bits) - 1)


def cpu_dropout_mask(shape: torch.Size, p: float, dtype: torch.dtype) -> Tensor:
    """Zeros with probability t / 256, else the reciprocal of 1 - t / 256; t is a whole number next to 256 p."""
    threshold = _threshold(p, dtype)
    count = int(np.prod(shape))
    seed = int(torch.randint(2**62, (), dtype=torch.int64))
    words = np.random.SFC64(seed).random_raw((count + 7) // 8)
    kept = torch.from_numpy(words.view(np.uint8)[:count] >= threshold).view(shape)
    # an integer product with the bit pattern of the scale: a third of the time of a product in bfloat16
    alike = BITS[dtype.itemsize]
    scale = torch.tensor(_cpu_scale(threshold, dtype), dtype=dtype).view(alike).item()
    return kept.to(alike).mul_(scale).view(dtype)


def _cpu_scale(threshold: int, dtype: torch.dtype) -> float:
    return torch.tensor(256 / (256 - threshold), dtype=dtype).item()


@cache
def _threshold(p: float, dtype: torch.dtype) -> int:
    """The nearest of the whole numbers next to 256 p whose scale, rounded to the type, keeps the expectation best."""

    def unfitness(t: int) -> tuple[float, float]:
        kept = (256 - t) / 256
        return round(abs(kept * torch.tensor(1 / kept, dtype=dtype).item() - 1), 3), abs(t - 256 * p)

    near = round(256 * p)
    return min((t for t in (near - 1, near, near + 1) if 0 <= t < 256), key=unfitness)
