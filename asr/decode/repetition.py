"""A guard against loops: attention that has lost its place says the same thing again and again."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asr.model.rows import select_rows

LONGEST_PERIOD = 32  # tokens of the longest block whose repetition is noticed


@dataclass(frozen=True)
class Repetition:
    """For each hypothesis and period p: how many of the last tokens in a row equal the token p places before them."""

    recent: Tensor  # (B, W, P) the last P tokens, newest first; -1 before the first
    runs: Tensor  # (B, W, P)

    @classmethod
    def start(cls, B: int, W: int, device: torch.device) -> Repetition:
        recent = torch.full((B, W, LONGEST_PERIOD), -1, device=device)
        return cls(recent, torch.zeros_like(recent))

    def forbid_(self, scores: Tensor, max_repeats: int, value: float) -> None:
        """Lowers `scores (B, W, V)`, in place, to `value` where a token would continue a loop: the first token, in
        `recent`, of a block that stands `max_repeats` times in a row."""
        period = torch.arange(1, LONGEST_PERIOD + 1, device=self.runs.device)
        ceiling = torch.full_like(self.recent, torch.inf, dtype=scores.dtype)
        ceiling = ceiling.masked_fill_(self.runs >= period * (max_repeats - 1), value)
        scores.scatter_reduce_(2, self.recent.clamp(min=0), ceiling, "amin")

    def advance(self, parents: Tensor, tokens: Tensor) -> Repetition:
        """The state of hypotheses `parents (B, W)` followed by `tokens (B, W)`."""
        recent, runs = select_rows(self.recent, parents), select_rows(self.runs, parents)
        newest = tokens[:, :, None]
        runs = torch.where(recent == newest, runs + 1, 0)
        return Repetition(torch.cat([newest, recent[:, :, :-1]], dim=2), runs)
