"""CTC in decoding: the best path, and prefix scores for the joint search (Watanabe et al. 2017; Hori et al. 2017).

The textbook's prefix score walks over the frames once for every hypothesis and candidate. Here the score of *all*
candidates of all hypotheses is one matrix product (frames × frames-by-vocabulary), and the forward variables are
computed for the hypotheses that survive alone, by cumulative sums instead of a loop over frames.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asr.decode.options import Hypothesis
from asr.text.tokenizer import BLANK, EOS

NEVER = -1e30  # log 0, finite so that differences stay defined


def ctc_greedy(ctc_log_probs: Tensor, lens: Tensor) -> list[list[Hypothesis]]:
    """The likeliest path of each utterance, repeats merged and blanks dropped; `(B, M, V)`, `(B,)`."""
    scores, path = ctc_log_probs.max(dim=-1)
    inside = torch.arange(path.shape[1], device=path.device) < lens[:, None]
    new = torch.ones_like(inside)
    new[:, 1:] = path[:, 1:] != path[:, :-1]
    kept = (inside & new & (path != BLANK)).tolist()
    totals = (scores * inside).sum(dim=1).tolist()
    return [
        [Hypothesis([token for token, keep in zip(row, keeps, strict=True) if keep], total)]
        for row, keeps, total in zip(path.tolist(), kept, totals, strict=True)
    ]


@dataclass(frozen=True)
class PrefixState:
    """Forward variables of B × W prefixes: log-probability of the prefix by frame t (t = 0: before the first),
    its last label at t (`label`) or a blank at t (`blank`), each `(B, W, M + 1)`; the prefix's last token `(B, W)`."""

    label: Tensor
    blank: Tensor
    last: Tensor

    def select(self, parents: Tensor) -> PrefixState:
        index = parents[:, :, None].expand(-1, -1, self.label.shape[2])
        return PrefixState(self.label.gather(1, index), self.blank.gather(1, index), self.last.gather(1, parents))


class CTCPrefixScorer:
    """Log-probability, by CTC, that the transcript starts with a prefix. Double precision throughout."""

    def __init__(self, ctc_log_probs: Tensor, lens: Tensor):
        """`ctc_log_probs (B, M, V)`, `lens (B,)`."""
        log_probs = ctc_log_probs.double()
        inside = torch.arange(ctc_log_probs.shape[1], device=lens.device) < lens[:, None]
        self.probs = log_probs.exp() * inside[:, :, None]
        # cumulative log-probabilities of each label, from 0 before the first frame: (B, M + 1, V)
        self.cumulative = torch.nn.functional.pad(log_probs.cumsum(dim=1), (0, 0, 1, 0))
        self.lens = lens

    def start(self, width: int) -> PrefixState:
        """The state of the empty prefix, `width` times per utterance."""
        blank = self.cumulative[:, None, :, BLANK].expand(-1, width, -1)
        last = torch.full(blank.shape[:2], -1, device=blank.device)
        return PrefixState(torch.full_like(blank, NEVER), blank, last)

    def score(self, state: PrefixState) -> Tensor:
        """Scores `(B, W, V)` of every prefix followed by every token; by `EOS`, that of the prefix as a whole."""
        total = torch.logaddexp(state.label, state.blank)
        scores = self._expect(total[:, :, :-1])
        repeat = state.last.clamp(min=0)
        # a label that repeats the last one needs a blank between them
        probs = self.probs.gather(2, repeat[:, None, :].expand(-1, self.probs.shape[1], -1)).transpose(1, 2)
        repeated = self._log(state.blank[:, :, :-1], lambda weights: (weights * probs).sum(dim=2, keepdim=True))
        ended = total.gather(2, self.lens[:, None, None].expand(-1, total.shape[1], 1))
        scores = torch.where((state.last >= 0)[:, :, None], scores.scatter(2, repeat[:, :, None], repeated), scores)
        scores[:, :, EOS] = ended[:, :, 0]
        scores[:, :, BLANK] = NEVER
        return scores

    def advance(self, state: PrefixState, parents: Tensor, tokens: Tensor) -> PrefixState:
        """The state of prefixes `parents (B, W)` followed by `tokens (B, W)`, neither blank nor end."""
        state = state.select(parents)
        before = torch.where((tokens == state.last)[:, :, None], state.blank, torch.logaddexp(state.label, state.blank))
        index = tokens[:, None, :].expand(-1, self.cumulative.shape[1], -1)
        along_label = self.cumulative.gather(2, index).transpose(1, 2)
        along_blank = self.cumulative[:, None, :, BLANK]
        label = self._recur(before, along_label)
        return PrefixState(label, self._recur(label, along_blank), tokens)

    @staticmethod
    def _recur(source: Tensor, along: Tensor) -> Tensor:
        """r[t] = log(exp r[t-1] + exp source[t-1]) + x[t], r[0] = log 0, where `along` is the running sum of x."""
        r = torch.logcumsumexp(source[:, :, :-1] - along[:, :, :-1], dim=2) + along[:, :, 1:]
        return torch.nn.functional.pad(r.clamp(min=NEVER), (1, 0), value=NEVER)

    def _expect(self, log_weights: Tensor) -> Tensor:
        return self._log(log_weights, lambda weights: weights @ self.probs)

    @staticmethod
    def _log(log_weights: Tensor, linear) -> Tensor:
        """log of a function that is linear in exp(log_weights), scaled so that nothing underflows."""
        top = log_weights.amax(dim=2, keepdim=True)
        return (linear((log_weights - top).exp()).log() + top).clamp(min=NEVER)

    def select_utterances(self, utterances: Tensor) -> CTCPrefixScorer:
        other = object.__new__(CTCPrefixScorer)
        for name in ("probs", "cumulative", "lens"):
            setattr(other, name, getattr(self, name).index_select(0, utterances))
        return other
