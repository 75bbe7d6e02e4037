"""Exact attention within a window, in blocks: time and memory grow with the length instead of its square.

The queries are cut into blocks; a block sees the keys at its own positions, earlier keys in its first query's window,
and later keys in its last query's window. (The sliding window of Beltagy et al. 2020, Longformer, section 3.)
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from asr.model.dot_product import scaled_dot_product_attention
from asr.model.dropout import Dropout
from asr.model.masks import either, window_mask

SMALLEST_BLOCK = 64  # queries; shorter blocks would spend their time on keys that neighbouring blocks share
TOGETHER = 32  # blocks computed at once, each with its own copy of its keys; limits the memory


def local_attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    left: int,
    right: int,
    mask: Tensor | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """softmax(Q Kᵀ / √d_k) V over the keys from `left` before each query to `right` after it: Q, K `(B, H, L, d_k)`,
    V `(B, H, L, d_v)` -> `(B, H, L, d_v)`.

    `mask (B, 1, 1, L)`: keys in the padding. The result of a query that sees no key is zero."""
    B, _, L, _ = Q.shape
    left, right = min(left, L - 1), min(right, L - 1)
    if min(left, right) == L - 1:  # no key is outside any window
        return scaled_dot_product_attention(Q, K, V, mask, dropout)
    if left + right >= L:  # few keys are outside any window: blocks would cost more than they save
        outside = window_mask(L, left, right, Q.device)
        return scaled_dot_product_attention(Q, K, V, either(mask, outside), dropout)
    block = max(SMALLEST_BLOCK, left + right)
    width, blocks = left + block + right, -(-L // block)
    beyond = blocks * block - L
    Q = nn.functional.pad(Q, (0, 0, 0, beyond)).unflatten(2, (blocks, block))
    K, V = (nn.functional.pad(x, (0, 0, left, beyond + right)).unfold(2, width, block).mT for x in (K, V))
    hidden = torch.zeros(1, 1, 1, L, dtype=torch.bool, device=Q.device) if mask is None else mask
    hidden = nn.functional.pad(hidden, (left, beyond + right), value=True)[:, 0, 0].unfold(1, width, block)
    # key j of a block is at position j - left relative to the block's first query
    outside = window_mask(width, 0, left + right, Q.device)[:block]

    def of_blocks(some: slice) -> Tensor:
        masks = outside | hidden[:, some, None].expand(B, -1, block, -1)  # (B, blocks, block, width)
        q, k, v = (x[:, :, some].transpose(1, 2).flatten(0, 1) for x in (Q, K, V))  # (B · blocks, H, ...)
        out = scaled_dot_product_attention(q, k, v, masks.flatten(0, 1)[:, None], dropout)
        return out.unflatten(0, (B, -1)).transpose(1, 2).flatten(2, 3)

    if torch.compiler.is_compiling():  # a loop is unrolled: each number of iterations would be compiled again
        return of_blocks(slice(None))[:, :, :L]
    parts = [of_blocks(slice(first, first + TOGETHER)) for first in range(0, blocks, TOGETHER)]
    return torch.cat(parts, dim=2)[:, :, :L]
