"""Muon (Jordan et al. 2024): the update of a weight matrix is its momentum with all singular values made alike.

What gradients have little of is learnt as quickly as what they have much of: it takes fewer updates than AdamW, each a
little dearer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
STEPS = 5  # of the iteration
QUINTIC = (3.4445, -4.7750, 2.0315)  # takes singular values from 0.003 on to between 0.7 and 1.2 within those


def orthogonalized(M: Tensor) -> Tensor:
    """Nearly U Vᵀ for each matrix U S Vᵀ of `M (n, a, b)`, a ≤ b, by Newton and Schulz's iteration in bfloat16."""
    a, b, c = QUINTIC
    X = M.bfloat16()
    X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        A = X @ X.mT
        X = torch.baddbmm(X, torch.baddbmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X


class Muon(torch.optim.AdamW):
    """Muon for `matrices`, AdamW for the parameters of `groups`, as both are used together.

    A matrix `(a, b)` moves by 0.2 √max(a, b) times the orthogonalised momentum, which is about as far as AdamW would
    move it (Liu et al. 2025, "Muon is scalable for LLM training"): `lr` and `weight_decay` mean the same for both.
    Gradients are overwritten."""

    def __init__(self, matrices: Iterable[nn.Parameter], groups: list[dict[str, Any]], weight_decay: float, **settings):
        """`weight_decay` of the matrices; `settings` are AdamW's."""
        matrices = sorted(matrices, key=_sides)
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
        learning = [p for p in matrices["params"] if p.grad is not None]
        for _, alike in groupby(learning, key=_sides):
            self._move(list(alike), matrices["lr"], matrices["weight_decay"])
        return loss

    @torch.no_grad()
    def _move(self, matrices: list[nn.Parameter], lr: float, weight_decay: float) -> None:
        """Updates matrices of one shape, lying or standing; or none, where `found_inf` says so, as fused AdamW does."""
        moves = 1.0 - getattr(self, "found_inf", torch.zeros(()))
        for p in matrices:
            state = self.state[p]  # named as AdamW's, which reads it with its own
            if not state:
                state.update(step=torch.zeros((), device=p.device), exp_avg=torch.zeros_like(p))
            state["step"] += moves
            state["exp_avg"].lerp_(p.grad.nan_to_num_(0.0, 0.0, 0.0), (1 - MOMENTUM) * moves)
            p.grad.lerp_(state["exp_avg"], MOMENTUM)  # Nesterov's
        updates = orthogonalized(torch.stack([_lying(p.grad.bfloat16()) for p in matrices]))
        updates = updates * (0.2 * max(_sides(matrices[0])) ** 0.5 * lr * moves)
        for p, update in zip(matrices, updates, strict=True):
            p.mul_(1 - lr * weight_decay * moves)
            _lying(p).sub_(update)


def _sides(matrix: Tensor) -> tuple[int, ...]:
    return tuple(sorted(matrix.shape))


def _lying(matrix: Tensor) -> Tensor:
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
