"""Timestamps among the tokens: each stretch of text stands between the times at which it starts and ends (Radford et
al. 2022, section 2.3), in steps of 0.02 s from the start of the window."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from asr.decode.options import Hypothesis
from asr.model.config import ModelConfig

STEP = 0.02  # seconds from one time to the next
LATEST_BEGIN = 50  # steps: the first stretch starts within a second


class TimedSegment(NamedTuple):
    """A part of a hypothesis with the times around it."""

    begin: float | None  # seconds; None: there is none
    end: float | None
    hypothesis: Hypothesis


def apply_timestamp_rules_(scores: Tensor, tokens: Tensor, config: ModelConfig, value: float) -> None:
    """Lowers log-probabilities `scores (B, W, V)`, in place, to `value` where a token cannot follow `tokens (B, W, S)`.

    A transcript starts with a time; times come in pairs, except for the first and the last, and never decrease; and
    where all times together are likelier than the likeliest other token, a time must follow."""
    text, times = scores[:, :, : config.first_timestamp], scores[:, :, config.first_timestamp :]
    if not tokens.shape[2]:
        text.fill_(value)
        times[:, :, LATEST_BEGIN + 1 :] = value
        return
    is_time = tokens >= config.first_timestamp
    one = is_time[:, :, -1]
    two = one & is_time[:, :, -2] if tokens.shape[2] > 1 else one
    newest = (tokens - config.first_timestamp).clamp(min=-1).amax(dim=2)
    lowest = torch.where(one & ~two, newest, newest + 1)
    step = torch.arange(times.shape[2], device=scores.device)
    times.masked_fill_(two[:, :, None] | (step < lowest[:, :, None]), value)
    scores[:, :, : config.eos].masked_fill_((one & ~two)[:, :, None], value)
    timely = times.logsumexp(dim=2) > text.amax(dim=2)
    text.masked_fill_(timely[:, :, None], value)


def timed_segments(hypothesis: Hypothesis, config: ModelConfig) -> list[TimedSegment]:
    """The hypothesis cut at its times, which are left out; in one part if it has none."""
    tokens, first = hypothesis.tokens, config.first_timestamp
    marks = [i for i, token in enumerate(tokens) if first is not None and token >= first]
    if not marks:
        return [TimedSegment(None, None, hypothesis)]
    times = [None, *(STEP * (tokens[i] - first) for i in marks), None]
    found = []
    for (before, after), (begin, end) in zip(pairwise([-1, *marks, len(tokens)]), pairwise(times), strict=True):
        here = slice(before + 1, after)
        if tokens[here]:
            scores = hypothesis.token_scores[here]
            spans = hypothesis.spans and hypothesis.spans[here]
            found.append(TimedSegment(begin, end, Hypothesis(tokens[here], sum(scores), scores, spans)))
    return found
