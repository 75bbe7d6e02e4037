"""Data types: which one is fast, and which one autocast multiplies in, if it is on."""

from __future__ import annotations

import torch
from torch import Tensor


def best_precision(device: torch.device | str) -> str:
    """bfloat16 if the hardware multiplies it fast (AVX512-BF16, AMX, GPUs from Ampere on), else float32."""
    if torch.device(device).type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"


def dtype_of_products(x: Tensor) -> torch.dtype:
    """The type in which a linear layer on x's device multiplies `x`."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def to_autocast_dtype(x: Tensor) -> Tensor:
    """`x` in the type that autocast multiplies in, if it is on: rounded once instead of for each product that reads
    it."""
    return x.to(dtype_of_products(x))
