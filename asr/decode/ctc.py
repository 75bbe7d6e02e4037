"""CTC in decoding: the best path, and prefix scores for the joint search (Watanabe et al. 2017; Hori et al. 2017).

The textbook's prefix score walks over the frames once for every hypothesis and candidate. Here the score of *all*
candidates of all hypotheses is one matrix product (frames × frames-by-vocabulary), and the forward variables are
computed for the hypotheses that survive alone, by cumulative sums instead of a loop over frames.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asr.decode.options import Hypothesis
from asr.model.masks import length_mask
from asr.model.rows import select_rows
from asr.text.tokenizer import BLANK, EOS

NEVER = -1e30  # log 0, finite so that differences stay defined
HEARD = 0.25  # likelihood of a label that is not taken for noise (there 0.2 at most, in speech more than 0.7 somewhere)
NEAR = 5.0  # nats below its best by which a hypothesis still counts as standing at a frame
ARRIVED, BEHIND = 8.0, 4  # nats below its best from which on it has arrived, and frames that are kept before that


def ctc_greedy(ctc_log_probs: Tensor, lens: Tensor) -> list[list[Hypothesis]]:
    """The likeliest path of each utterance, repeats merged and blanks dropped; `(B, M, V)`, `(B,)`."""
    scores, path = ctc_log_probs.max(dim=-1)
    inside = torch.arange(path.shape[1], device=path.device) < lens[:, None]
    new = torch.ones_like(inside)
    new[:, 1:] = path[:, 1:] != path[:, :-1]
    kept = (inside & new & (path != BLANK)).cpu()
    totals = (scores * inside).sum(dim=1).tolist()
    return [
        [Hypothesis(tokens[keep].tolist(), total, own[keep].tolist())]
        for tokens, own, keep, total in zip(path.cpu(), scores.cpu(), kept, totals, strict=True)
    ]


def hears_something(ctc_log_probs: Tensor, lens: Tensor) -> Tensor:
    """Which utterances `(B,)` have a frame where a label is likelier than the blank, and not one of many that may be;
    `(B, M, V)`, `(B,)`."""
    likeliest, label = ctc_log_probs.max(dim=-1)
    heard = (label != BLANK) & (likeliest > math.log(HEARD))
    return heard.masked_fill(length_mask(lens, heard.shape[1])[:, 0, 0], False).any(dim=1)


@dataclass(frozen=True)
class PrefixState:
    """Forward variables of B × W prefixes within a window of K frames: log-probability of the prefix by frame t (t = 0:
    before the first), its last label at t (`label`) or a blank at t (`blank`)."""

    label: Tensor  # (B, W, K + 1)
    blank: Tensor  # (B, W, K + 1)
    last: Tensor  # (B, W) the prefix's last token; -1: none
    start: Tensor  # (B,) the t at which the window begins

    def reorder(self, parents: Tensor) -> PrefixState:
        label, blank = select_rows(self.label, parents), select_rows(self.blank, parents)
        return PrefixState(label, blank, self.last.gather(1, parents), self.start)

    def select(self, utterances: Tensor) -> PrefixState:
        return PrefixState(*(x.index_select(0, utterances) for x in vars(self).values()))


class CTCPrefixScorer:
    """Log-probability, by CTC, that the transcript starts with a prefix. Forward variables are in double precision, the
    sums over frames that follow from them in single: a continuation e^-80 times as likely as its prefix is impossible.

    Exact where the window is 0 or as wide as the memory. A narrower one follows the hypotheses in time: labels are
    expected within it alone, what comes after it is taken for blanks where a prefix ends."""

    def __init__(self, ctc_log_probs: Tensor, lens: Tensor, window: int = 0):
        """`ctc_log_probs (B, M, V)`, `lens (B,)`; `window` in frames."""
        M = ctc_log_probs.shape[1]
        self.window = min(window, M) or M
        inside = torch.arange(M, device=lens.device) < lens[:, None]
        self.probs = (ctc_log_probs.float().exp() * inside[:, :, None]).transpose(1, 2).contiguous()  # (B, V, M)
        # cumulative log-probabilities of each label, from 0 before the first frame: (B, V, M + 1)
        self.cumulative = torch.nn.functional.pad(ctc_log_probs.double().cumsum(dim=1).transpose(1, 2), (1, 0))
        self.lens = lens

    def start(self, width: int) -> PrefixState:
        """The state of the empty prefix, `width` times per utterance."""
        start = torch.zeros_like(self.lens)
        blank = self._along(self.cumulative[:, BLANK], start, self.window + 1)[:, None].expand(-1, width, -1)
        last = torch.full(blank.shape[:2], -1, device=blank.device)
        return self._follow(PrefixState(torch.full_like(blank, NEVER), blank, last, start))

    def score(self, state: PrefixState) -> Tensor:
        """Scores `(B, W, V)` of every prefix followed by every token; by `EOS`, that of the prefix as a whole."""
        total = torch.logaddexp(state.label, state.blank)
        probs = self._along(self.probs, state.start, self.window)
        scores = self._log(total[:, :, :-1], lambda weights: weights @ probs.transpose(1, 2))
        # a label that repeats the last one needs a blank between them
        repeat = state.last.clamp(min=0)
        of_last = select_rows(probs, repeat)
        repeated = self._log(state.blank[:, :, :-1], lambda weights: (weights * of_last).sum(dim=2, keepdim=True))
        scores = torch.where((state.last >= 0)[:, :, None], scores.scatter(2, repeat[:, :, None], repeated), scores)
        scores[:, :, EOS] = self._ended(total, state.start)
        scores[:, :, BLANK] = NEVER
        return scores

    def advance(self, state: PrefixState, parents: Tensor, tokens: Tensor) -> PrefixState:
        """The state of prefixes `parents (B, W)` followed by `tokens (B, W)`, neither blank nor end."""
        state = state.reorder(parents)
        before = torch.where((tokens == state.last)[:, :, None], state.blank, torch.logaddexp(state.label, state.blank))
        cumulative = self._along(self.cumulative, state.start, self.window + 1)
        label = self._recur(before, select_rows(cumulative, tokens))
        blank = self._recur(label, cumulative[:, None, BLANK])
        return self._follow(PrefixState(label, blank, tokens, state.start))

    def select(self, utterances: Tensor) -> CTCPrefixScorer:
        """The scorer of some of the utterances."""
        return self._like(*(x.index_select(0, utterances) for x in (self.probs, self.cumulative, self.lens)))

    def forget(self, state: PrefixState) -> tuple[CTCPrefixScorer, PrefixState]:
        """Both without the frames before all hypotheses of all utterances have arrived, where nothing is added to them
        any more; a host-device sync."""
        if self.window < self.probs.shape[2]:
            return self, state
        total = torch.logaddexp(state.label, state.blank)
        best = total.amax(dim=2, keepdim=True)
        arrived = (total >= best - ARRIVED).byte().argmax(dim=2)  # the first such frame
        arrived = arrived.masked_fill(best[:, :, 0] <= NEVER, self.window)  # the impossible do not hold the others up
        past = int(torch.minimum(arrived.amin(dim=1), self.lens).amin()) - BEHIND
        if past <= 0:
            return self, state
        scorer = self._like(self.probs[:, :, past:], self.cumulative[:, :, past:], self.lens - past)
        return scorer, replace(state, label=state.label[:, :, past:], blank=state.blank[:, :, past:])

    def _like(self, probs: Tensor, cumulative: Tensor, lens: Tensor) -> CTCPrefixScorer:
        other = object.__new__(CTCPrefixScorer)
        other.probs, other.cumulative, other.lens = probs, cumulative, lens
        other.window = min(self.window, probs.shape[2])
        return other

    def _along(self, x: Tensor, start: Tensor, size: int) -> Tensor:
        """`size` entries over time of `x (B, ..., M or M + 1)` from `start (B,)`."""
        if self.window == self.probs.shape[2]:
            return x
        t = start[:, None] + torch.arange(size, device=start.device)
        return x.gather(-1, t.view(len(x), *[1] * (x.ndim - 2), size).expand(*x.shape[:-1], size))

    def _ended(self, total: Tensor, start: Tensor) -> Tensor:
        """Log-probability `(B, W)` of the prefixes as a whole, from `total (B, W, K + 1)` in the window at `start`."""
        last = (self.lens - start).clamp(0, self.window)
        ended = total.gather(2, last[:, None, None].expand(-1, total.shape[1], 1))[:, :, 0]
        blank = self.cumulative[:, BLANK]
        rest = blank.gather(1, self.lens[:, None]) - blank.gather(1, (start + last)[:, None])
        return (ended + rest).clamp(min=NEVER)

    def _follow(self, state: PrefixState) -> PrefixState:
        """Moves the window on to where the hindmost hypothesis stands: it stands at the last frame by which it has lost
        little of its probability, and a quarter of the window is kept before that."""
        M, K = self.probs.shape[2], self.window
        if K == M:
            return state
        total = torch.logaddexp(state.label, state.blank)
        near = total >= total.amax(dim=2, keepdim=True) - NEAR
        stands = (near * torch.arange(1, K + 2, device=near.device)).amax(dim=2) - 1
        hindmost = stands.masked_fill(total.amax(dim=2) <= NEVER, K).amin(dim=1)
        start = torch.minimum(state.start + (hindmost - K // 4).clamp(min=0), (self.lens - K).clamp(min=0))
        start = torch.maximum(start, state.start)
        t = (start - state.start)[:, None] + torch.arange(K + 1, device=start.device)
        known, index = (t <= K)[:, None, :], t.clamp(max=K)[:, None, :].expand_as(state.label)
        blank = self.cumulative[:, BLANK]
        on = blank.gather(1, (state.start[:, None] + t).clamp(max=M)) - blank.gather(1, state.start[:, None] + K)
        label = state.label.gather(2, index).where(known, NEVER)
        later = total[:, :, -1:] + on[:, None, :]
        return PrefixState(label, state.blank.gather(2, index).where(known, later).clamp(min=NEVER), state.last, start)

    @staticmethod
    def _recur(source: Tensor, along: Tensor) -> Tensor:
        """r[t] = log(exp r[t-1] + exp source[t-1]) + x[t], r[0] = log 0, where `along` is the running sum of x."""
        r = torch.logcumsumexp(source[:, :, :-1] - along[:, :, :-1], dim=2) + along[:, :, 1:]
        return torch.nn.functional.pad(r.clamp(min=NEVER), (1, 0), value=NEVER)

    @staticmethod
    def _log(log_weights: Tensor, linear) -> Tensor:
        """log of a function that is linear in exp(log_weights), which are scaled by the largest."""
        top = log_weights.amax(dim=2, keepdim=True)
        return (linear((log_weights - top).float().exp()).log() + top).clamp(min=NEVER)
