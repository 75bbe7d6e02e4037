"""Arithmetic of decoding: float32, or something quicker that costs a little accuracy."""

from __future__ import annotations

import torch
from torch import nn

from asr.decode.packing import Packed, can_pack, pack
from asr.model.language_model import LanguageModel
from asr.model.transformer import Transformer

PRECISIONS = ("auto", "float32", "bfloat16", "int8")


def best_precision(device: torch.device | str) -> str:
    """bfloat16 where the hardware multiplies it quickly (AVX512-BF16, AMX, GPUs from Ampere on), else float32."""
    if torch.device(device).type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"


def with_precision(model: Transformer | LanguageModel, precision: str) -> Transformer | LanguageModel:
    """The model with its weights in `precision`, changed in place where that is possible.

    auto is the `best_precision`; bfloat16 on a CPU packs the layers (`asr.decode.packing`); int8 quantises the linear
    layers' weights, and what comes into them as it comes (CPU alone). Raises ValueError for another name, or int8 on a
    GPU."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision: {precision!r} is not one of {', '.join(PRECISIONS)}")
    device = next(model.parameters()).device
    if precision == "auto":
        precision = best_precision(device)
    if any(isinstance(module, Packed) for module in model.modules()):
        if precision == "bfloat16":
            return model
        raise ValueError("the model is packed for decoding in bfloat16: load its folder again for another precision")
    if precision == "bfloat16":
        model.to(torch.bfloat16)
        return pack(model) if can_pack(device) else model
    if precision == "int8":
        if device.type != "cpu":
            raise ValueError("precision: int8 is for the CPU; take bfloat16 on a GPU")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8, inplace=True)
    return model
