"""Flash attention (Dao et al. 2022, Dao 2023) on a GPU: with a length mask or a causal mask, and dropout.

torch's own kernel has no length mask, uses Philox to draw which weights are dropped, and returns the gradients of
queries, keys and values as three tensors, which must be copied if one product computed all three. The kernels here, in
`asr.model.flash_kernels`, avoid all of that. In compiled layers they are a custom operator.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from asr.model.autocast import dtype_of_products

logger = logging.getLogger(__name__)

OLDEST, HOPPER = (8, 0), 9  # compute capabilities: the first GPUs with bfloat16 (Ampere), and the H100
WIDEST = 128  # width of the widest heads, whose gradients stay in registers

# per kernel: the rows that one program computes, and its launch settings; few rows, so that many programs run at once
OF_QUERIES = {"QUERIES": 64, "KEYS": 32, "num_warps": 4, "num_stages": 3}
OF_KEYS = {"QUERIES": 32, "KEYS": 64, "num_warps": 4, "num_stages": 2}
FEWER_REGISTERS = {"maxnreg": 128}  # per thread: with it four blocks of keys run at once instead of three
BLOCKS = {"forward": (64, OF_QUERIES), "backward_of_queries": (64, OF_QUERIES), "backward_of_keys": (64, OF_KEYS)}


def lens_for_kernels(lens: Tensor) -> Tensor | None:
    """The lengths `(B,)` if the kernels run on their device, else None."""
    return lens if lens.is_cuda and _runs_kernels(lens.device) else None


@cache
def _runs_kernels(device: torch.device) -> bool:
    """Whether Triton works, tried once: it comes with torch, but needs a C compiler and Python's headers."""
    if torch.version.hip or torch.cuda.get_device_capability(device) < OLDEST:
        return False
    try:
        q = torch.zeros(1, 1, 3, 64, dtype=torch.bfloat16, device=device)
        out, *others = _operator(q, None, None, 1, None, 0.0)
        _backward(out, q, None, None, out, *others, 1, None, 0.0)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # from a compiler, a driver, Triton: there is a fallback
        logger.warning(
            "attention falls back to torch's kernels, which take twice the time: our own do not run here (%s)", error
        )
        return False
    return True


def fits(x: Tensor, key_dim: int, value_dim: int) -> bool:
    """Whether the kernels support the type that `x` is projected to and heads of these widths."""
    half = dtype_of_products(x) in (torch.bfloat16, torch.float16)
    return half and key_dim == value_dim <= WIDEST and key_dim % 8 == 0


def flash_attention(
    q: Tensor, k: Tensor | None, v: Tensor | None, num_heads: int, lens: Tensor | None, p: float = 0.0
) -> Tensor:
    """dropout(softmax(Q Kᵀ / √d)) V: Q `(B, L_q, H, d)`, K and V `(B, L_k, H, d)` -> `(B, L_q, H, d)`.

    The result of one product stays in one tensor: if `v` is None, `k` has V's heads after K's, `(B, L_k, 2 H, d)`, and
    if `k` is None, too, `q` has the heads of all three. Queries see the first `lens (B,)` keys of their utterance;
    queries that see no keys give zeros. `lens` None: as many keys as queries, and no query sees a later key. Each
    weight is dropped with probability `p`."""
    return _operator(q, k, v, num_heads, lens, p)[0]


@torch.library.custom_op("asr::flash_attention", mutates_args=())
def _operator(
    q: Tensor, k: Tensor | None, v: Tensor | None, num_heads: int, lens: Tensor | None, p: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result, the log-sum-exp of each query's scores, and the numbers drawn for each query and each key."""
    from asr.model.flash_kernels import forward

    (B, L_q, L_k, d), device = _sizes(q, k), q.device
    out, lse = q.new_empty(B, L_q, num_heads, d), q.new_empty(B, num_heads, L_q, dtype=torch.float32)
    drawn = [
        torch.randint(-(2**31), 2**31, (count if p else 0,), dtype=torch.int32, device=device)
        for count in (lse.numel(), L_k)
    ]
    _launch(forward, L_q, (q, k, v), (out, lse), num_heads, lens, drawn, p)
    return out, lse, *drawn


@_operator.register_fake
def _(q, k, v, num_heads, lens, p):
    B, L_q, L_k, d = _sizes(q, k)
    drawn = [q.new_empty(count if p else 0, dtype=torch.int32) for count in (B * num_heads * L_q, L_k)]
    return q.new_empty(B, L_q, num_heads, d), q.new_empty(B, num_heads, L_q, dtype=torch.float32), *drawn


@torch.library.custom_op("asr::flash_attention_backward", mutates_args=())
def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    out: Tensor,
    lse: Tensor,
    of_queries: Tensor,
    of_keys: Tensor,
    num_heads: int,
    lens: Tensor | None,
    p: float,
) -> list[Tensor]:
    from asr.model.flash_kernels import backward_of_keys, backward_of_queries

    _, L_q, L_k, _ = _sizes(q, k)
    given, drawn = (q, k, v), [of_queries, of_keys]
    found = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given if x is not None]
    dQ, dK, dV = _parts(found, num_heads)
    delta, gradient = torch.empty_like(lse), gradient.contiguous()
    _launch(backward_of_queries, L_q, given, (out, gradient, lse, delta, dQ), num_heads, lens, drawn, p)
    _launch(backward_of_keys, L_k, given, (gradient, lse, delta, dK, dV), num_heads, lens, drawn, p)
    return found


@_backward.register_fake
def _(gradient, q, k, v, *others):
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v) if x is not None]


def _save(ctx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    *given, ctx.num_heads, lens, ctx.p = inputs
    ctx.set_materialize_grads(False)  # for outputs that only the backward pass reads
    ctx.save_for_backward(*given, lens, *output)


def _gradients(ctx, gradient: Tensor, *_) -> tuple[Tensor | None, ...]:
    *given, lens, out, lse, of_queries, of_keys = ctx.saved_tensors
    found = _backward(gradient, *given, out, lse, of_queries, of_keys, ctx.num_heads, lens, ctx.p)
    return *found, *[None] * (6 - len(found))


_operator.register_autograd(_gradients, setup_context=_save)


def _sizes(q: Tensor, k: Tensor | None) -> tuple[int, int, int, int]:
    """B, L_q, L_k, d."""
    return q.shape[0], q.shape[1], (q if k is None else k).shape[1], q.shape[3]


def _parts(together: list[Tensor], num_heads: int) -> list[Tensor]:
    """Q, K and V, or their gradients, as separate views."""
    return [part for x in together for part in x.split(num_heads, dim=2)]


def _launch(
    kernel: Callable,
    rows: int,
    given: tuple[Tensor | None, ...],
    others: tuple[Tensor, ...],
    num_heads: int,
    lens: Tensor | None,
    drawn: list[Tensor],
    p: float,
) -> None:
    """Runs `kernel` for each block of the `rows` rows of each head."""
    q, k, _ = given
    B, L_q, L_k, d = _sizes(q, k)
    parts = _parts([x.contiguous() for x in given if x is not None], num_heads)
    lens = None if lens is None else lens.contiguous()
    factors = math.log2(math.e) / math.sqrt(d), int(p * 2**32), 1 / (1 - p)
    strides = [d * x.shape[2] for x in (q, q if k is None else k)]  # a tensor's own is arbitrary if it has one row
    constants = {"D": d, "WIDTH": max(16, 1 << (d - 1).bit_length()), "DROPS": p > 0}
    block, setting = BLOCKS[kernel.__name__]
    if setting is OF_KEYS and 32 < d <= 64 and q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == HOPPER:
        setting = setting | FEWER_REGISTERS
    with torch.cuda.device_of(q):
        grid = (B * num_heads * -(-rows // block),)
        kernel[grid](*parts, *others, lens, *drawn, *factors, num_heads, L_q, L_k, *strides, **constants, **setting)
