"""Learning rates: linear warm-up, then cosine or inverse square root ("Attention Is All You Need", section 5.3)."""

from __future__ import annotations

import math

from asr.training.config import OptimizerConfig


def warmup_updates(config: OptimizerConfig, updates: int) -> int:
    """The length of the warm-up in updates, at least 1."""
    return max(1, round(config.warmup * updates if config.warmup < 1 else config.warmup))


def lr_factor(update: int, config: OptimizerConfig, updates: int) -> float:
    """The learning rate at an update (from 0) out of `updates`, as a fraction of `config.lr`. `inverse_sqrt` is the
    paper's curve, D^-0.5 · min(step^-0.5, step · warmup^-1.5), whose peak there is (D · warmup)^-0.5."""
    step, warmup = update + 1, warmup_updates(config, updates)
    if step < warmup:
        return step / warmup
    if config.schedule == "inverse_sqrt":
        return math.sqrt(warmup / step)
    progress = min(1.0, (step - warmup) / max(1, updates - warmup))
    return 0.5 * (1 + math.cos(math.pi * progress))
