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
WIDEST = 192  # of the heads for which all of these have a backward pass

Ends = tuple[Tensor, Tensor]  # where the sequences of queries end, and those of keys: both (2 B + 1,), the first 0


def sequence_ends(lens: Tensor, keys: int, queries: int) -> Ends | None:
    """What `flash_attention` is told of so many `queries` an utterance and so many `keys`, of which `lens (B,)` are no
    padding. None: this device has no such kernel, or torch is not to use it."""
    if not (lens.is_cuda and torch.backends.cuda.is_flash_attention_available()):
        return None
    if not torch.backends.cuda.flash_sdp_enabled() or torch.cuda.get_device_capability(lens.device) < OLDEST:
        return None
    return _ends(lens, keys, queries)


def _ends(lens: Tensor, keys: int, queries: int) -> Ends:
    turns = torch.arange(2 * len(lens) + 1, device=lens.device, dtype=torch.int32)
    starts = torch.arange(len(lens), device=lens.device) * keys
    of_keys = pad(torch.stack([starts + lens, starts + keys], dim=1).flatten(), (1, 0)).int()
    return (turns + 1) // 2 * queries, of_keys


def fits(Q: Tensor, V: Tensor) -> bool:
    """Whether there is a kernel for such heads."""
    width = Q.shape[3]
    return Q.dtype in (torch.bfloat16, torch.float16) and width == V.shape[3] and width % 8 == 0 and width <= WIDEST


def flash_attention(Q: Tensor, K: Tensor, V: Tensor, ends: Ends, dropout: Dropout) -> Tensor:
    """softmax(Q Kᵀ / √d) V: Q `(B, H, L_q, d)`, K and V `(B, H, L_k, d)` -> `(B, H, L_q, d)`, where each utterance's
    queries see the keys that `ends` says; with none to see they give zeros."""
    rows = (x.transpose(1, 2).flatten(0, 1) for x in (Q, K, V))  # (B · L, H, d)
    p = dropout.p if dropout.training else 0.0
    out, *_ = torch.ops.aten._flash_attention_forward(*rows, *ends, Q.shape[2], K.shape[2], p, False, False)
    return out.unflatten(0, (Q.shape[0], Q.shape[2])).transpose(1, 2)
