"""Dropout (Srivastava et al. 2014), with masks that are cheap on a CPU.

torch draws Bernoulli numbers on one thread, which takes a quarter of a training step on a CPU. There the masks come
from numpy's SFC64 instead, one byte an element, seeded from torch's generator: `torch.manual_seed` fixes them too.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Dropout(nn.Module):
    """Zeroes elements with probability `p` and scales the rest by 1 / (1 - p); the identity in evaluation.

    On a CPU `p` becomes a multiple of 1/256 and the scale follows, so that the expectation is kept, as far as the scale
    can be written in the type (to 0.1 % in bfloat16)."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu" or torch.compiler.is_compiling():  # whose kernels draw as they compute
            return nn.functional.dropout(x, self.p)
        return x * cpu_dropout_mask(x.shape, self.p, x.dtype)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def cpu_dropout_mask(shape: torch.Size, p: float, dtype: torch.dtype) -> Tensor:
    """Zeros with probability t / 256, else the reciprocal of the rest; t lies beside 256 p."""
    threshold = _threshold(p, dtype)
    count = int(np.prod(shape))
    seed = int(torch.randint(2**62, (), dtype=torch.int64))
    words = np.random.SFC64(seed).random_raw((count + 7) // 8)
    kept = torch.from_numpy(words.view(np.uint8)[:count] >= threshold).view(shape)
    # a whole number of the same bits is multiplied: in bfloat16 a third of the time
    alike = BITS[dtype.itemsize]
    scale = torch.tensor(256 / (256 - threshold), dtype=dtype).view(alike).item()
    return kept.to(alike).mul_(scale).view(dtype)


@cache
def _threshold(p: float, dtype: torch.dtype) -> int:
    """Of the whole numbers beside 256 p the nearest whose scale, rounded to the type, keeps the expectation best."""

    def unfitness(t: int) -> tuple[float, float]:
        kept = (256 - t) / 256
        return round(abs(kept * torch.tensor(1 / kept, dtype=dtype).item() - 1), 3), abs(t - 256 * p)

    near = round(256 * p)
    return min((t for t in (near - 1, near, near + 1) if 0 <= t < 256), key=unfitness)
