"""Arithmetic of decoding: float32, or something quicker that costs a little accuracy."""

from __future__ import annotations

import torch

from asr.decode.packing import Packed, can_pack, pack
from asr.decode.quantization import QuantizedNorm, can_quantize, quantize
from asr.model.autocast import best_precision
from asr.model.language_model import LanguageModel
from asr.model.transformer import Transformer

PRECISIONS = ("auto", "float32", "bfloat16", "int8")


def with_precision(model: Transformer | LanguageModel, precision: str) -> Transformer | LanguageModel:
    """The model with its weights in `precision`, changed in place where that is possible.

    auto is the `best_precision`; bfloat16 on a CPU packs the layers (`asr.decode.packing`);
    int8 multiplies what a norm gives in whole numbers (`asr.decode.quantization`), and computes the rest in bfloat16
    where that is quick. Raises ValueError for another name, or int8 where the hardware is not quick at it or norms come
    last (`norm_first=False`)."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision: {precision!r} is not one of {', '.join(PRECISIONS)}")
    device = next(model.parameters()).device
    if precision == "auto":
        precision = best_precision(device)
    if packed := [module for module in model.modules() if isinstance(module, Packed)]:
        there = "int8" if any(isinstance(module, QuantizedNorm) for module in packed) else "bfloat16"
        if precision == there:
            return model
        raise ValueError(f"the model is packed for decoding in {there}: load its folder again for another precision")
    quick = best_precision(device)
    if precision == "int8":
        if isinstance(model, Transformer) and not model.config.norm_first:
            raise ValueError(f"precision: int8 is for models whose layers begin with a norm; take {quick} here")
        if not can_quantize(device):
            raise ValueError(f"precision: int8 is for CPUs with AVX512-VNNI or AMX; take {quick} here")
        quantize(model, getattr(torch, quick))
        precision = quick
    elif precision == "bfloat16":
        model.to(torch.bfloat16)
    return pack(model) if precision == "bfloat16" and can_pack(device) else model
