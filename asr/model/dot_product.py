"""Scaled dot-product attention ("Attention Is All You Need", section 3.2.1)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from asr.model.dropout import Dropout
from asr.model.masks import additive_mask


def attention_weights(Q: Tensor, K: Tensor, mask: Tensor | None = None) -> Tensor:
    """softmax(Q Kᵀ / √d_k): Q `(B, H, L_q, d_k)`, K `(B, H, L_k, d_k)` -> `(B, H, L_q, L_k)`.

    `mask` is bool, True = masked out, and broadcasts to the result; a row that is masked out whole gives zeros. Or it
    is an `additive_mask`."""
    scores = Q @ (K * (1 / math.sqrt(K.shape[-1]))).transpose(-2, -1)
    if mask is None:
        return scores.softmax(dim=-1)
    if mask.is_floating_point():
        return (scores + mask).softmax(dim=-1)
    weights = (scores + additive_mask(mask, scores.dtype)).softmax(dim=-1)
    return weights.masked_fill(mask.all(dim=-1, keepdim=True), 0.0)


def leave_out_cudnn() -> None:
    """Of the fused kernels of CUDA: cuDNN's, which torch prefers on a Hopper, makes a plan for every shape and keeps
    it, and a search has another shape at each step (tens of milliseconds and some memory, each time); its dropout is
    by sixteenths in some versions."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def scaled_dot_product_attention(
    Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None, dropout: Dropout | None = None
) -> Tensor:
    """softmax(Q Kᵀ / √d_k) V, with V `(B, H, L_k, d_v)` -> `(B, H, L_q, d_v)`; `mask` as in `attention_weights`.

    torch's fused kernels compute it, but for training on a CPU: theirs spends a third of the step there (most of it in
    the backward pass), plain matrix products are twice as fast. A test holds the two together."""
    if Q.device.type == "cpu" and torch.is_grad_enabled():
        weights = attention_weights(Q, K, mask)
        return (dropout(weights) if dropout else weights) @ V
    p = dropout.p if dropout and dropout.training else 0.0
    if mask is None or mask.is_floating_point():
        return nn.functional.scaled_dot_product_attention(Q, K, V, attn_mask=mask, dropout_p=p)
    empty = mask.all(dim=-1, keepdim=True)
    out = nn.functional.scaled_dot_product_attention(Q, K, V, attn_mask=~mask | empty, dropout_p=p)
    return out.masked_fill(empty, 0.0)
