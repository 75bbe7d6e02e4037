"""Makes a trained encoder or language model deeper without changing what it computes: training continues where it
stopped, with more layers (Net2Net, Chen, Goodfellow & Shlens 2016; progressive stacking, Gong et al. 2019)."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import torch
from torch import nn

from asr.model.language_model import LanguageModel
from asr.model.layers import ConformerEncoderLayer, Residual, last_linears
from asr.model.transformer import Transformer


def deepen(model: Transformer | LanguageModel, more: int) -> None:
    """Inserts `more` layers between those of the encoder or language model, evenly spaced, in place. Each is a copy of
    the layer below it that adds nothing to the residual stream yet.

    Raises ValueError if there are fewer than `more` layers."""
    stack, depth = (model, "decoder_layers") if isinstance(model, LanguageModel) else (model.encoder, "encoder_layers")
    layers, count = list(stack.layers), len(stack.layers)
    if not 0 <= more <= count:
        raise ValueError(f"add_layers={more}: there are {count} layers, and each can have one new layer above it")
    for place in sorted((round(i * count / more) for i in range(1, more + 1)), reverse=True):
        layers.insert(place, _copy_without_effect(layers[place - 1]))
    stack.layers = nn.ModuleList(layers)
    model.config = stack.config = replace(model.config, **{depth: len(layers)})


@torch.no_grad()
def _copy_without_effect(layer: nn.Module) -> nn.Module:
    """A copy of `layer` that leaves the result unchanged when placed above it. The scale and shift of `layer`'s last
    norm move to the copy: `layer`'s output is then normalised already, and the copy's other norms do not change it."""
    copy = deepcopy(layer)
    for linear in last_linears(copy):
        nn.init.zeros_(linear.weight)
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)
    for norm in (*_norms_between(layer)[-1:], *_norms_between(copy)[:-1]):
        nn.init.ones_(norm.weight)
        nn.init.zeros_(norm.bias)
    return copy


def _norms_between(layer: nn.Module) -> list[nn.LayerNorm]:
    """The norms on a layer's residual stream itself, in order; a pre-norm Transformer layer has none."""
    norms = [part.norm for part in layer.children() if isinstance(part, Residual) and not part.norm_first]
    return [*norms, layer.norm] if isinstance(layer, ConformerEncoderLayer) else norms
