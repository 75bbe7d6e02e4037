"""Scaled dot-product attention ("Attention Is All You Need", section 3.2.1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from asr.model.dropout import Dropout
from asr.model.masks import additive_mask, causal_mask, empty_rows

# with at least MANY heads in the batch and at most FEW queries per head, plain products beat the fused kernel
MANY, FEW = 32, 32


def attention_weights(Q: Tensor, K: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(Q Kᵀ / √d_k): Q `(B, H, L_q, d_k)`, K `(B, H, L_k, d_k)` -> `(B, H, L_q, L_k)`.

    `mask` is bool, True = masked out, and broadcasts to the result; a fully masked row gives zeros. Or it is an
    `additive_mask`."""
    weights = _softmax_of_products(Q, K, mask)
    empty = empty_rows(mask)
    return weights if empty is None else weights.masked_fill(empty, 0.0)


def _softmax_of_products(Q: Tensor, K: Tensor, mask: Tensor | None) -> Tensor:
    """`attention_weights`, but with arbitrary finite values in fully masked rows."""
    scores = (Q * (1 / math.sqrt(K.shape[-1]))) @ K.contiguous().transpose(-2, -1)
    if mask is not None:
        scores = scores + (mask if mask.is_floating_point() else additive_mask(mask, scores.dtype))
    # in single precision: the softmax of bfloat16 took older versions of torch three times as long
    return scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)


def leave_out_cudnn() -> None:
    """Turns off cuDNN's fused attention, which torch prefers on a Hopper GPU: it makes and keeps a plan for every shape
    (a tenth of a second, forward and backward, on an H100), and a search has a new shape at each step, a training
    twenty new shapes in each epoch, whose last batches are not full."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def scaled_dot_product_attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    mask: Tensor | None = None,
    dropout: Dropout | None = None,
    causal: bool = False,
) -> Tensor:
    """softmax(Q Kᵀ / √d_k) V, with V `(B, H, L_k, d_v)` -> `(B, H, L_q, d_v)`; `mask` as in `attention_weights`.
    `causal`: no query sees a later key; if there is no mask, GPU kernels do this without an explicit one.

    torch's fused kernels compute the result, except on a CPU for the few queries of a search step: the fused kernel
    multiplies head by head, which then takes longer than products of all heads at once. A test checks that both ways
    agree."""
    if causal and mask is not None:
        mask, causal = mask | causal_mask(K.shape[2], K.device), False
    empty = empty_rows(mask)
    if _has_many_small_products(Q):
        mask = causal_mask(K.shape[2]) if causal else mask
        weights = _softmax_of_products(Q, K, mask)
        out = (dropout(weights) if dropout else weights) @ V
    else:
        p = dropout.share if dropout else 0.0
        allowed = mask if empty is None else ~mask | empty
        out = nn.functional.scaled_dot_product_attention(Q, K, V, attn_mask=allowed, dropout_p=p, is_causal=causal)
    return out if empty is None else out.masked_fill(empty, 0.0)


def _has_many_small_products(Q: Tensor) -> bool:
    return (
        Q.device.type == "cpu" and Q.dtype == torch.bfloat16 and Q.shape[0] * Q.shape[1] >= MANY and Q.shape[2] <= FEW
    )
