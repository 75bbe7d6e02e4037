"""Muon (Jordan et al. 2024): the update of a weight matrix is its momentum with all singular values made alike.

What gradients have little of is learnt as quickly as what they have much of: it takes fewer updates than AdamW, each a
little dearer.
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
# (a, b, c) of a x + b x³ + c x⁵, one a step: each brings the singular values that the step before left (at first 0.003
# to 1, and 2 % beyond, for what bfloat16 rounds) as near to 1 as such a polynomial can; they end between 0.77 and 1.23
# (Amsel et al. 2025, "The Polar Express")
QUINTICS = (
    (8.2218, -23.3469, 16.6338),
    (3.9728, -2.8449, 0.5170),
    (3.4735, -2.5057, 0.4810),
    (2.5044, -1.7907, 0.4071),
)


def orthogonalized(M: Tensor) -> Tensor:
    """Nearly U Vᵀ for each matrix U S Vᵀ of `M (n, a, b)`, by Newton and Schulz's iteration: bfloat16, or float32
    where the hardware has it not (a CPU without it takes 25 times as long to emulate it)."""
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
    """`orthogonalized(M)`, where several processes hold the same `M (n, a, b)`: each does its share of the matrices."""
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
    """Muon for `matrices`, AdamW for the parameters of `groups`, as both are used together.

    A matrix `(a, b)` moves by 0.2 √max(a, b) times the orthogonalised momentum, which is about as far as AdamW would
    move it (Liu et al. 2025, "Muon is scalable for LLM training"): `lr` and `weight_decay` mean the same for both."""

    def __init__(self, matrices: Iterable[nn.Parameter], groups: list[dict[str, Any]], weight_decay: float, **settings):
        """`weight_decay` of the matrices; `settings` are AdamW's."""
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
        """Updates matrices of one shape, or none where `found_inf` says so. The momentum of all lies with the first."""
        found_inf = getattr(self, "found_inf", None)  # 1 or 0, on the device
        G = torch.stack([p.grad for p in matrices])
        state = self.state[matrices[0]]
        if not state:  # named as AdamW's, which reads it with its own
            state.update(step=torch.zeros((), device=G.device), exp_avg=torch.zeros_like(G))
        M = state["exp_avg"]
        state["step"] += 1 if found_inf is None else 1 - found_inf
        if found_inf is not None:
            G = torch.where(found_inf > 0, M, G)
        M.lerp_(G, 1 - MOMENTUM)
        updates = orthogonalized_in_shares(G.lerp_(M, MOMENTUM))  # Nesterov's
        updates = updates.to(G.dtype) * (0.2 * max(G.shape[1:]) ** 0.5)
        # lr · (update + weight_decay · p), in one pass over all
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
