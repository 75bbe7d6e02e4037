"""Learning rates: linear warm-up, then cosine or inverse square root ("Attention Is All You Need", section 5.3)."""

from __future__ import annotations

import math

from asr.training.config import OptimizerConfig


def warmup_updates(config: OptimizerConfig, updates: int) -> int:
    """The warm-up in updates; at least 1."""
    return max(1, round(config.warmup * updates if config.warmup < 1 else config.warmup))


def rate(update: int, config: OptimizerConfig, updates: int) -> float:
    """The learning rate at an update (from 0) of `updates`, as a part of `config.lr`."""
    step, warmup = update + 1, warmup_updates(config, updates)
    if step < warmup:
        return step / warmup
    if config.schedule == "inverse_sqrt":
        return math.sqrt(warmup / step)
    progress = min(1.0, (step - warmup) / max(1, updates - warmup))
    return 0.5 * (1 + math.cos(math.pi * progress))


def noam(step: int, d_model: int, warmup: int) -> float:
    """The paper's rate at `step` (from 1): D^-0.5 · min(step^-0.5, step · warmup^-1.5).

    `inverse_sqrt` is this curve with its peak, (D · warmup)^-0.5, set by `lr` instead."""
    return d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
