"""CTC in decoding: the best path, and prefix scores for the joint search (Watanabe et al. 2017; Hori et al. 2017).

The textbook prefix score loops over the frames once for every hypothesis and candidate. Here the scores of *all*
candidates of all hypotheses are one matrix product (hypotheses × frames by frames × vocabulary), and the forward
variables are computed only for the hypotheses that survive, by cumulative sums instead of a loop over frames.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from asr.decode.options import Hypothesis
from asr.model.masks import length_mask
from asr.model.rows import select_rows
from asr.text.tokenizer import BLANK, EOS

LOG_ZERO = -1e30  # log 0, finite so that differences stay defined
HEARD = 0.25  # probability above which a label counts as heard (noise reaches 0.2, speech 0.7 and more somewhere)
FAR = 80.0  # nats: what is e^-80 times as likely is lost in sums in single precision


def ctc_greedy(ctc_log_probs: Tensor, lens: Tensor) -> list[list[Hypothesis]]:
    """The likeliest path of each utterance, with repeats merged and blanks dropped, from `(B, M, V)`, lens `(B,)`."""
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
    """Which utterances `(B,)` have a frame whose likeliest label is not the blank and has a probability above `HEARD`,
    from `(B, M, V)`, lens `(B,)`."""
    likeliest, label = ctc_log_probs.max(dim=-1)
    heard = (label != BLANK) & (likeliest > math.log(HEARD))
    return (heard & ~length_mask(lens, heard.shape[1])[:, 0, 0]).any(dim=1)


@dataclass(frozen=True)
class PrefixState:
    """Forward variables of B × W prefixes in a window of K frames: the log-probability of the prefix by frame t (t = 0:
    before the first), over all paths (`total`) and over those with a blank at t (`blank`)."""

    total: Tensor  # (B, W, K + 1)
    blank: Tensor  # (B, W, K + 1)
    last: Tensor  # (B, W) the prefix's last token; -1: none


class PrefixScores(NamedTuple):
    """The log-probabilities of B × W prefixes followed by each of V tokens, `base + gains`, and of the prefixes as
    whole transcripts."""

    base: Tensor  # (B, W, 1), double
    gains: Tensor  # (B, W, V), single precision; -inf: impossible, as blank and end always are
    ended: Tensor  # (B, W), double


@dataclass(frozen=True)
class CTCPrefixScorer:
    """CTC's log-probabilities that the transcript starts with a prefix. Forward variables are in double precision, the
    sums over frames based on them in single: a continuation e^-80 times as likely as its prefix is impossible.

    So only the frames from where the hindmost hypothesis has arrived to where the foremost may soon be matter. `follow`
    moves this window along; at first, it is the whole memory."""

    probs: Tensor  # (B, V, M) of the labels; 0 past the end of an utterance
    cumulative: Tensor  # (B, V, M + 1) running sums of their logarithms, 0 before the first frame
    unheard: Tensor  # (B, M + 1) nats that it costs to start no label until then, at most `FAR` per frame
    lens: Tensor  # (B,)
    begin: int  # of the window, in frames
    end: int

    @classmethod
    def of(cls, ctc_log_probs: Tensor, lens: Tensor) -> CTCPrefixScorer:
        """The scorer for `ctc_log_probs (B, M, V)`, `lens (B,)`."""
        M = ctc_log_probs.shape[1]
        along = ctc_log_probs.float().transpose(1, 2).contiguous()
        inside = torch.arange(M, device=lens.device) < lens[:, None]
        cumulative = torch.nn.functional.pad(along, (1, 0)).cumsum(dim=2, dtype=torch.double)
        # a path that starts no label has a blank, or continues the label of the frame before
        before = along.argmax(dim=1)[:, :-1]
        on = along[:, :, 1:].gather(1, before[:, None])[:, 0].masked_fill(before == BLANK, -math.inf)
        nats = -torch.logaddexp(along[:, BLANK], torch.nn.functional.pad(on, (1, 0), value=-math.inf))
        unheard = torch.nn.functional.pad(nats.clamp(0, FAR), (1, 0)).cumsum(dim=1)
        return cls(along.exp() * inside[:, None], cumulative, unheard, lens, 0, M)

    def start(self, width: int) -> PrefixState:
        """The state of the empty prefix, `width` times per utterance."""
        blank = self._along()[:, BLANK, None].expand(-1, width, -1)
        return PrefixState(blank, blank, self.lens.new_full(blank.shape[:2], -1))

    def score(self, state: PrefixState) -> PrefixScores:
        """The scores of every prefix followed by every token, and of every prefix as a whole transcript."""
        probs = self.probs[:, :, self.begin : self.end]
        base, weights = self._linear(state.total[:, :, :-1])
        with torch.autocast(probs.device.type, enabled=False):
            gains = (weights @ probs.transpose(1, 2)).log_()
        # a label that repeats the last one needs a blank between them
        repeat = state.last.clamp(min=0)
        top, weights = self._linear(state.blank[:, :, :-1])
        repeated = (weights * select_rows(probs, repeat)).sum(dim=2, keepdim=True).log() + (top - base).float()
        repeated.masked_fill_(top <= LOG_ZERO / 2, -math.inf)
        place = repeat[:, :, None]
        gains.scatter_(2, place, repeated.where((state.last >= 0)[:, :, None], gains.gather(2, place)))
        for neither in (BLANK, EOS):
            gains[:, :, neither] = -math.inf
        return PrefixScores(base, gains, self._ended(state.total))

    def advance(self, state: PrefixState, parents: Tensor, tokens: Tensor) -> PrefixState:
        """The state of prefixes `parents (B, W)` followed by `tokens (B, W)`, which are neither blank nor end."""
        total, blank = select_rows(state.total, parents), select_rows(state.blank, parents)
        before = torch.where((tokens == state.last.gather(1, parents))[:, :, None], blank, total)
        along = self._along()
        label = self._recur(before, select_rows(along, tokens))
        blank = self._recur(label, along[:, BLANK, None])
        return PrefixState(torch.logaddexp(label, blank), blank, tokens)

    def follow(self, state: PrefixState, steps: int) -> tuple[CTCPrefixScorer, PrefixState]:
        """The scorer and the state with the window moved to where the hypotheses are in the next `steps`; a host-device
        sync.

        The window starts before the frame in which the hindmost one arrives: no hypothesis is extended before that. It
        ends where at least `steps` further labels have started after the last frame where the foremost may stand;
        pauses and the frames that a label lasts do not count."""
        t = torch.arange(self.begin, self.end + 1, device=self.lens.device)
        total = state.total.masked_fill(t > self.lens[:, None, None], LOG_ZERO)  # whatever is heard in the padding
        best = total.amax(dim=2, keepdim=True)
        possible = best[:, :, 0] > LOG_ZERO  # the others do not hold the window up
        near = total >= best - FAR
        arrived = near.byte().argmax(dim=2) + self.begin  # the first such t
        hindmost = arrived.where(possible, self.end).amin(dim=1)
        stands = (near * t).amax(dim=2)  # the last such t
        foremost = stands.where(possible, self.begin).amax(dim=1)
        ahead = (self.unheard <= self.unheard.gather(1, foremost[:, None]) + FAR * steps).sum(dim=1)
        bounds = hindmost.amin() - 1, torch.minimum(ahead, self.lens).amax()
        begin, end = torch.stack(bounds).tolist()
        begin = max(begin, self.begin)
        end = max(end, begin + 1)
        return replace(self, begin=begin, end=end), self._moved(state, begin, end)

    def _moved(self, state: PrefixState, begin: int, end: int) -> PrefixState:
        """The state in another window: in frames that are new to it, blanks follow all prefixes."""
        kept = slice(begin - self.begin, end - self.begin + 1)
        total, blank = state.total[:, :, kept], state.blank[:, :, kept]
        if end > self.end:
            along = self.cumulative[:, BLANK, None, self.end : end + 1]
            later = state.total[:, :, -1:] + along[:, :, 1:] - along[:, :, :1]
            total, blank = torch.cat([total, later], dim=2), torch.cat([blank, later], dim=2)
        return replace(state, total=total, blank=blank)

    def _along(self) -> Tensor:
        """The cumulative log-probabilities of all labels in the window: `(B, V, K + 1)`."""
        return self.cumulative[:, :, self.begin : self.end + 1]

    def _ended(self, total: Tensor) -> Tensor:
        """The log-probabilities `(B, W)` of whole transcripts, from `total (B, W, K + 1)`: blanks follow the window."""
        last = self.lens.clamp(self.begin, self.end)[:, None]
        ended = total.gather(2, (last - self.begin)[:, :, None].expand(-1, total.shape[1], 1))[:, :, 0]
        blank = self.cumulative[:, BLANK]
        return ended + blank.gather(1, self.lens[:, None]) - blank.gather(1, last)

    @staticmethod
    def _recur(source: Tensor, along: Tensor) -> Tensor:
        """r[t] = log(exp r[t-1] + exp source[t-1]) + x[t], r[0] = log 0, where `along` is the running sum of x."""
        r = torch.logcumsumexp(source[:, :, :-1] - along[:, :, :-1], dim=2) + along[:, :, 1:]
        return torch.nn.functional.pad(r.clamp(min=LOG_ZERO), (1, 0), value=LOG_ZERO)

    @staticmethod
    def _linear(log_weights: Tensor) -> tuple[Tensor, Tensor]:
        """The maximum `(B, W, 1)` of each row of `(B, W, K)`, and the weights relative to it, in single precision."""
        top = log_weights.amax(dim=2, keepdim=True)
        return top, (log_weights - top).float().exp_()
