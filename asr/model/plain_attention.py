"""Attention in training on a CPU, by plain matrix products, which torch multiplies twice as fast as its fused kernel
computes the same (most of the difference is in the backward pass).

What is as large as the weights is read and written as seldom as possible: in place, in the type of the products, and
scales are applied to smaller tensors.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from asr.model.dropout import draw_kept, keep
from asr.model.masks import additive_mask, empty_rows


def plain_attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, num_heads: int, mask: Tensor | None, p: float = 0.0
) -> Tensor:
    """dropout(softmax(Q Kᵀ / √d_k)) V: Q `(B, L_q, H, d_k)`, K `(B, L_k, H, d_k)`, V `(B, L_k, H, d_v)` ->
    `(B, L_q, H, d_v)`.

    The result of one product stays in one tensor, as in `asr.model.flash_attention`: if `v` is None, `k` has V's heads
    after K's, and if `k` is None, too, `q` has the heads of all three. `mask` broadcasts to `(B, H, L_q, L_k)` and is
    bool, True = masked out (queries that see no keys give zeros), or an `additive_mask`. Each weight is dropped with
    probability `p`."""
    return _PlainAttention.apply(q, k, v, num_heads, mask, p)


class _PlainAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q: Tensor, k: Tensor | None, v: Tensor | None, num_heads: int, mask: Tensor | None, p: float
    ) -> Tensor:
        Q, K, V = _heads(q, k, v, num_heads)
        Q, K, V = _scaled(Q, 1 / math.sqrt(K.shape[-1])), K.contiguous(), V.contiguous()
        scores = Q @ K.mT
        if mask is not None:
            scores += mask if mask.is_floating_point() else additive_mask(mask, scores.dtype)
        weights = dropped = scores.softmax(dim=-1)
        kept, ctx.scale = None, 1.0
        if p:
            kept, ctx.scale = draw_kept(weights.shape, p)
            dropped = keep(weights, kept, out=scores)
        ctx.empty = empty_rows(mask)
        ctx.save_for_backward(Q, K, V, weights, dropped, kept)
        ctx.num_heads, ctx.shapes = num_heads, [None if x is None else x.shape for x in (q, k, v)]
        return _scaled(_without(dropped @ V, ctx.empty).transpose(1, 2), ctx.scale)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        Q, K, V, weights, dropped, kept = ctx.saved_tensors
        gradient = _without(_scaled(gradient.transpose(1, 2), ctx.scale), ctx.empty)
        of_weights = gradient @ V.mT
        if kept is not None:
            keep(of_weights, kept, out=of_weights)
        of_scores = torch._softmax_backward_data(of_weights, weights, -1, weights.dtype)
        of_parts = [None if shape is None else gradient.new_empty(shape) for shape in ctx.shapes]
        of_Q, of_K, of_V = _heads(*of_parts, ctx.num_heads)
        torch.mul(of_scores @ K, 1 / math.sqrt(K.shape[-1]), out=of_Q)
        of_K.copy_(of_scores.mT @ Q)
        of_V.copy_(dropped.mT @ gradient)
        return *of_parts, None, None, None


def _heads(q: Tensor, k: Tensor | None, v: Tensor | None, num_heads: int) -> list[Tensor]:
    """Views of the three parts, each `(B, H, L, d)`."""
    return [part.transpose(1, 2) for x in (q, k, v) if x is not None for part in x.split(num_heads, dim=2)]


def _scaled(x: Tensor, scale: float) -> Tensor:
    """The product, contiguous."""
    return torch.mul(x, scale, out=x.new_empty(x.shape))


def _without(x: Tensor, empty: Tensor | None) -> Tensor:
    """`x`, zero in empty rows, in place."""
    return x if empty is None else x.masked_fill_(empty, 0.0)
