"""Log-posteriors over the vocabulary, whose size rarely suits a GPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

ALIGNED = 8  # columns in half precision: products of rows that are not aligned to it take four times as long on a GPU


def log_posteriors(output: nn.Module, x: Tensor) -> Tensor:
    """log softmax of the linear layer `output` applied to `x (..., D)`: `(..., V)`, float32.

    In training on a GPU, with its many rows, the vocabulary is padded."""
    missing = -output.out_features % ALIGNED if x.is_cuda and torch.is_grad_enabled() else 0
    if not missing:
        return output(x).float().log_softmax(dim=-1)
    weight, bias = pad(output.weight, (0, 0, 0, missing)), output.bias
    scores = linear(x, weight, None if bias is None else pad(bias, (0, missing)))
    return scores[..., : output.out_features].float().log_softmax(dim=-1)
