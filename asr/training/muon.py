"""Muon (Jordan et al. 2024): the update of a weight matrix is its momentum with all singular values made equal.

Directions that are weak in the gradients are learnt as fast as strong ones: it needs fewer updates than AdamW, each of
which costs a little more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.sgd import sgd

from asr.model.autocast import best_precision

MOMENTUM = 0.95
# (a, b, c) of a x + b x³ + c x⁵, one per step: each brings the singular values that the previous step left (at first
# 0.003 to 1, plus 2 % for bfloat16's rounding) as near to 1 as such a polynomial can; they end between 0.77 and 1.23
# (Amsel et al. 2025, "The Polar Express")
QUINTICS = (
    (8.2218, -23.3469, 16.6338),
    (3.9728, -2.8449, 0.5170),
    (3.4735, -2.5057, 0.4810),
    (2.5044, -1.7907, 0.4071),
)


def orthogonalized(M: Tensor) -> Tensor:
    """Approximately U Vᵀ for each matrix U S Vᵀ of `M (n, a, b)`, by Newton-Schulz iteration in bfloat16, or in float32
    on hardware without bfloat16 (emulating it takes a CPU 25 times as long)."""
    X = M.bfloat16() if best_precision(M.device) == "bfloat16" else M.float()
    X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp(min=1e-7)
    for a, b, c in QUINTICS:
        if M.shape[1] > M.shape[2]:
            A = X.mT @ X
            X = torch.baddbmm(X, X, torch.baddbmm(A, A, A, beta=b, alpha=c), beta=a)
        else:
            A = X @ X.mT
            X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X


def orthogonalized_in_shares(M: Tensor) -> Tensor:
    """`orthogonalized(M)` if several processes hold the same `M (n, a, b)`: each computes its share of the matrices."""
    if not dist.is_initialized():
        return orthogonalized(M)
    share = -(-len(M) // dist.get_world_size())
    begin = dist.get_rank() * share
    mine = M[begin : begin + share]
    mine = orthogonalized(F.pad(mine, (0, 0, 0, 0, 0, share - len(mine))))
    of_all = mine.new_empty(dist.get_world_size() * share, *mine.shape[1:])
    dist.all_gather(list(of_all.split(share)), mine)
    return of_all[: len(M)]


class Muon(torch.optim.AdamW):
    """Muon for `matrices`, AdamW for the parameters of `groups`: the usual combination.

    A matrix `(a, b)` moves by 0.2 √max(a, b) times the orthogonalised momentum, which is about as far as AdamW would
    move it (Liu et al. 2025, "Muon is scalable for LLM training"): `lr` and `weight_decay` mean the same for both."""

    def __init__(self, matrices: Iterable[nn.Parameter], groups: list[dict[str, Any]], weight_decay: float, **settings):
        """`weight_decay` is for the matrices; `settings` are AdamW's."""
        matrices = sorted(matrices, key=lambda p: p.shape)
        rest = [{**group, "muon": False} for group in groups]
        super().__init__([{"params": matrices, "weight_decay": weight_decay, "muon": True}, *rest], **settings)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        (matrices,), groups = [g for g in self.param_groups if g["muon"]], self.param_groups
        self.param_groups = [g for g in groups if not g["muon"]]
        super().step()
        self.param_groups = groups
        for _, alike in groupby(matrices["params"], key=lambda p: p.shape):
            self._move(list(alike), matrices)
        return loss

    @torch.no_grad()
    def _move(self, matrices: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Updates matrices of one shape unless `found_inf` is set. The momentum of all is in the first one's state."""
        found_inf = getattr(self, "found_inf", None)  # 1 or 0, on the device
        G = torch.stack([p.grad for p in matrices])
        state = self.state[matrices[0]]
        if not state:  # named like AdamW's state, since AdamW loads it with its own
            state.update(step=torch.zeros((), device=G.device), exp_avg=torch.zeros_like(G))
        M = state["exp_avg"]
        state["step"] += 1 if found_inf is None else 1 - found_inf
        if found_inf is not None:
            G = torch.where(found_inf > 0, M, G)
        M.lerp_(G, 1 - MOMENTUM)
        updates = orthogonalized_in_shares(G.lerp_(M, MOMENTUM))  # Nesterov's
        updates = updates.to(G.dtype) * (0.2 * max(G.shape[1:]) ** 0.5)
        # p -= lr · (update + weight_decay · p), in one pass over all
        sgd(
            matrices,
            list(updates.unbind()),
            [None] * len(matrices),
            weight_decay=group["weight_decay"],
            lr=group["lr"],
            momentum=0.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            foreach=False,
            fused=group["fused"],
            found_inf=found_inf,
        )
