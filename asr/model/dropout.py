"""Dropout (Srivastava et al. 2014), with masks that are cheap on a CPU and in compiled layers.

torch draws Bernoulli numbers on one thread, which takes a quarter of a training step on a CPU. On a CPU the masks come
from numpy's SFC64 instead, one byte per element, and stay bytes. The code that torch.compile generates runs ten rounds
of Philox for each element, which takes a GPU longer than reading the element, and stores the mask for the backward
pass. In compiled layers the masks are instead a hash of the element's index, which the backward pass recomputes. Both
are seeded from torch's generators, so `torch.manual_seed` makes them reproducible, too.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import relu

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Dropout(nn.Module):
    """Zeroes elements with probability `p` and scales the rest by 1 / (1 - p); the identity in evaluation.

    On a CPU `p` is rounded to a multiple of 1/256 and the scale adjusted to keep the expectation."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.share:
            return x
        if torch.compiler.is_compiling():
            return torch.where(hashed_mask(x.shape, self.p, x.device), x * (1 / (1 - self.p)), 0.0)
        return _DroppedOnCPU.apply(x, self.p) if x.device.type == "cpu" else nn.functional.dropout(x, self.p)

    def of_relu(self, x: Tensor) -> Tensor:
        """dropout(relu(x)), of which a GPU keeps only the result for the backward pass: zeros have no gradient."""
        if self.share and x.is_cuda and not torch.compiler.is_compiling():  # which decides for itself what to save
            return _DroppedReLU.apply(x, self.p)
        return self(relu(x))

    @property
    def share(self) -> float:
        """What is zeroed now: nothing in evaluation."""
        return self.p if self.training else 0.0

    def extra_repr(self) -> str:
        return f"p={self.p}"


class _DroppedOnCPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, p: float) -> Tensor:
        kept, ctx.scale = draw_kept(x.shape, p)
        ctx.save_for_backward(kept)
        return keep(x, kept).mul_(ctx.scale)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return keep(gradient, *ctx.saved_tensors).mul_(ctx.scale), None


class _DroppedReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, p: float) -> Tensor:
        y = nn.functional.dropout(relu(x), p)
        ctx.save_for_backward(y)
        ctx.scale = 1 / (1 - p)
        return y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        return torch.ops.aten.threshold_backward(gradient, y, 0) * ctx.scale, None


def trains_on_cpu(module: nn.Module, x: Tensor) -> bool:
    """Whether `module` is in training with inputs like `x` on a CPU, layer by layer (not compiled)."""
    training = module.training and torch.is_grad_enabled()
    return training and x.device.type == "cpu" and not torch.compiler.is_compiling()


def draw_kept(shape: torch.Size, p: float) -> tuple[Tensor, float]:
    """What dropout keeps on a CPU, a bool `shape`, and the scale of the rest: False with probability t / 256 and
    1 / (1 - t / 256), where t is the whole number next to 256 p, at most 255."""
    threshold, count = min(round(256 * p), 255), int(np.prod(shape))
    seed = int(torch.randint(2**62, (), dtype=torch.int64))
    words = np.random.SFC64(seed).random_raw((count + 7) // 8)
    kept = words.view(np.uint8)[:count] >= threshold
    return torch.from_numpy(kept).view(shape), 256 / (256 - threshold)


def keep(x: Tensor, kept: Tensor, out: Tensor | None = None) -> Tensor:
    """`x` on a CPU, zero where it is not `kept` (bool); written to `out`, which can be `x`, or to a new tensor.

    Products of bit patterns: by numpy, which reads the bytes as they are (twice as fast as torch, which would write
    them out as integers first), unless torch has several threads for it."""
    out = torch.empty_like(x) if out is None else out
    alike = BITS[x.itemsize]
    if torch.get_num_threads() == 1:
        np.multiply(x.detach().view(alike).numpy(), kept.numpy(), out=out.view(alike).numpy())
    else:
        torch.mul(x.view(alike), kept.to(alike), out=out.view(alike))
    return out


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
