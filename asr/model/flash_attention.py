"""Flash attention (Dao 2023) over keys of which some are padding, on a GPU.

torch's `scaled_dot_product_attention` computes so where nothing is masked out; where it is shown a length mask, another
kernel takes more than twice as long. The same kernel also knows many sequences that lie one after another and is told
where each ends. To it an utterance of a padded batch is two of them: all its queries with its own keys, and no query
with those of its padding. So nothing is moved, and the padding's keys get gradients of zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from asr.model.dropout import Dropout

OLDEST = (8, 0)  # the compute capability from which there are kernels (Ampere)


def key_ends(lens: Tensor, size: int) -> Tensor | None:
    """Where the sequences of keys end that `flash_attention` is told of, for `lens (B,)` of `size` that are no padding:
    `(2 B + 1,)`, the first of them 0. None: this device has no such kernel."""
    available = lens.is_cuda and torch.backends.cuda.is_flash_attention_available()
    if not available or torch.cuda.get_device_capability(lens.device) < OLDEST:
        return None
    return _ends(lens, size)


def _ends(lens: Tensor, size: int) -> Tensor:
    starts = torch.arange(len(lens), device=lens.device) * size
    return pad(torch.stack([starts + lens, starts + size], dim=1).flatten(), (1, 0)).int()


def fits(Q: Tensor, V: Tensor) -> bool:
    """Whether there is a kernel for such heads."""
    width = Q.shape[3]
    return Q.dtype in (torch.bfloat16, torch.float16) and width == V.shape[3] and width % 8 == 0 and width <= 256


def flash_attention(Q: Tensor, K: Tensor, V: Tensor, key_ends: Tensor, dropout: Dropout) -> Tensor:
    """softmax(Q Kᵀ / √d) V: Q `(B, H, L_q, d)`, K and V `(B, H, L_k, d)` -> `(B, H, L_q, d)`, where each utterance's
    queries see the keys that `key_ends` says; with none to see they give zeros."""
    B, _, L, _ = Q.shape
    query_ends = _ends(torch.full((B,), L, device=Q.device), L)
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (Q, K, V))  # (B · L, H, d)
    p = dropout.p if dropout.training else 0.0
    out, *_ = torch.ops.aten._flash_attention_forward(*rows, query_ends, key_ends, L, K.shape[2], p, False, False)
    return out.unflatten(0, (B, L)).transpose(1, 2)
