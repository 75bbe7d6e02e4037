"""Times among the tokens: each stretch of text stands between the times at which it begins and ends (Radford et al.
2022, section 2.3), in steps of 0.02 s from the beginning of the window."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asr.decode.options import Hypothesis
from asr.model.config import ModelConfig

STEP = 0.02  # seconds from one time to the next
LATEST_BEGIN = 50  # steps: the first stretch begins within a second


class Stretch(NamedTuple):
    """A part of a hypothesis with the times around it."""

    begin: float | None  # seconds; None: it has none
    end: float | None
    hypothesis: Hypothesis


def forbid_untimely_(scores: Tensor, tokens: Tensor, config: ModelConfig, value: float) -> None:
    """Lowers log-probabilities `scores (B, W, V)`, in place, to `value` where a token cannot follow `tokens (B, W, S)`.

    A transcript begins with a time; times come in pairs but for the first and the last, and never go back; and where
    all of them together are likelier than the likeliest other token, one of them comes."""
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


def stretches(hypothesis: Hypothesis, config: ModelConfig) -> list[Stretch]:
    """The hypothesis cut at its times, without them; whole where it has none."""
    found, begin, first = [], None, 0
    tokens = hypothesis.tokens
    for i in range(len(tokens) + 1):
        at_end = i == len(tokens)
        if not at_end and (config.first_timestamp is None or tokens[i] < config.first_timestamp):
            continue
        time = None if at_end else STEP * (tokens[i] - config.first_timestamp)
        if i > first or (at_end and not found):
            scores = hypothesis.token_scores[first:i]
            score = hypothesis.score if at_end and not found else sum(scores)
            spans = hypothesis.spans and hypothesis.spans[first:i]
            found.append(Stretch(begin, time, Hypothesis(tokens[first:i], score, scores, spans)))
        begin, first = time, i + 1
    return found
