"""The precision of decoding: float32, or something faster that costs a little accuracy."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch

from asr.decode.packing import can_pack, pack
from asr.decode.quantization import QuantizedNorm, can_quantize, quantize
from asr.model.autocast import best_precision
from asr.model.language_model import LanguageModel
from asr.model.transformer import Transformer

PRECISIONS = ("auto", "float32", "bfloat16", "int8")


def with_precision(model: Transformer | LanguageModel, precision: str) -> Transformer | LanguageModel:
    """The model with its weights in `precision`, changed in place where that is possible.

    auto is the `best_precision`; bfloat16 on a CPU packs the layers (`asr.decode.packing`); int8 multiplies the outputs
    of norms as integers (`asr.decode.quantization`) and computes the rest in bfloat16 where that is fast. Raises what
    `check_precision` does."""
    precision, device = check_precision(model, precision), next(model.parameters()).device
    if _present(model) == precision:
        return model
    if precision == "int8":
        precision = best_precision(device)
        quantize(model, getattr(torch, precision))
    elif precision == "bfloat16":
        model.to(torch.bfloat16)
    return pack(model) if precision == "bfloat16" and can_pack(device) else model


def check_precision(model: Transformer | LanguageModel, precision: str) -> str:
    """The precision to change the model to: for auto, the `best_precision`.

    Raises ValueError for another name than `PRECISIONS`, for a model that was changed to another precision before, and
    for int8 if the hardware is not fast at it or the model is post-norm (`norm_first=False`)."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision: {precision!r} is not one of {', '.join(PRECISIONS)}")
    device = next(model.parameters()).device
    quick = best_precision(device)
    if precision == "auto":
        precision = quick
    if (there := _present(model)) not in ("float32", precision):
        raise ValueError(f"the model was changed to {there} before: load its folder again for {precision}")
    if precision == "int8":
        if isinstance(model, Transformer) and not model.config.norm_first:
            raise ValueError(f"precision: int8 is for models whose layers begin with a norm; take {quick} here")
        if not can_quantize(device):
            raise ValueError(f"precision: int8 is for CPUs with AVX512-VNNI or AMX; take {quick} here")
    return precision


def in_own_precision(method: Callable) -> Callable:
    """Runs a method of a recogniser, or a function of one, without gradients, and in the precision of its model
    whatever autocast is on."""

    @wraps(method)
    def run(recognizer, *args, **settings):
        with torch.inference_mode(), torch.autocast(recognizer.model.device.type, enabled=False):
            return method(recognizer, *args, **settings)

    return run


def _present(model: Transformer | LanguageModel) -> str:
    """The precision that a model has, or was changed to."""
    if any(isinstance(module, QuantizedNorm) for module in model.modules()):
        return "int8"
    return str(next(model.parameters()).dtype).removeprefix("torch.")
