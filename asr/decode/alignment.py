"""Where the words of a transcript lie in time: the likeliest path through CTC that writes them (Viterbi)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asr.model.speech_model import SpeechModel
from asr.text.tokenizer import BLANK

NEVER = -1e9

Span = tuple[float, float]  # the first encoder frame and one past the last


@dataclass(frozen=True)
class TimedWord:
    """A word and when it is said."""

    text: str
    start: float  # seconds (of a text: tokens) from the beginning
    end: float


def ctc_alignments(log_probs: Tensor, lens: Tensor, tokens: Sequence[Sequence[int]]) -> list[list[Span] | None]:
    """The frames of each token on the likeliest path of each of a batch: log_probs `(B, M, V)`, lens `(B,)`, and B
    transcripts. None where the frames are too few for the transcript."""
    B, M, _ = log_probs.shape
    if not M:
        return [None if row else [] for row in tokens]
    counts = torch.tensor([len(row) for row in tokens])
    S = 2 * int(counts.max()) + 1
    labels = torch.full((B, S), BLANK)
    for b, row in enumerate(tokens):
        labels[b, 1 : 2 * len(row) : 2] = torch.tensor(row)
    skips = torch.zeros(B, S, dtype=torch.bool)  # over the blank between two different tokens
    skips[:, 3::2] = labels[:, 3::2] != labels[:, 1:-2:2]
    lens = lens.cpu()
    log_probs = log_probs.cpu()
    score = torch.full((B, S), NEVER, dtype=torch.double)
    score[:, :2] = log_probs[:, 0].gather(1, labels[:, :2])
    came = torch.zeros(M, B, S, dtype=torch.int8)  # from how many states back
    start = torch.full((B, 2), NEVER, dtype=torch.double)
    for t in range(1, M):
        before = torch.cat([start, score], dim=1)
        ways = torch.stack([before[:, 2:], before[:, 1:-1], before[:, :-2].masked_fill(~skips, NEVER)])
        best, back = ways.max(dim=0)
        inside = (t < lens)[:, None]
        score = torch.where(inside, best + log_probs[:, t].gather(1, labels), score)
        came[t] = back.masked_fill_(~inside, 0)
    rows = torch.arange(B)
    last = torch.stack([2 * counts, (2 * counts - 1).clamp(min=0)])
    final, which = score[rows, last].max(dim=0)
    state = last[which, rows]
    path = torch.empty(M, B, dtype=torch.int64)
    for t in range(M - 1, -1, -1):
        path[t] = state
        state = state - came[t, rows, state]
    return [
        _spans(path[:length, b].numpy(), count) if not count or (length and likely) else None
        for b, (count, length, likely) in enumerate(
            zip(counts.tolist(), lens.tolist(), (final > NEVER / 2).tolist(), strict=True)
        )
    ]


def _spans(path: np.ndarray, count: int) -> list[Span]:
    """The frames of each of `count` tokens on a path `(M,)` through their states, which never goes back."""
    states = 2 * np.arange(count) + 1
    first, end = np.searchsorted(path, states, "left"), np.searchsorted(path, states, "right")
    return list(zip(first.tolist(), end.tolist(), strict=True))


def timed_words(model: SpeechModel, tokens: Sequence[int], spans: Sequence[Span]) -> list[TimedWord]:
    """The words of `tokens`, each from the encoder frame in which its first begins to that in which its last ends:
    where CTC hears them, which is less than they sound."""
    first, step = frame_times(model)
    words = []
    for text, part in model.tokenizer.words(tokens):
        places = range(part.start, part.stop)
        heard = [i for i in places if model.tokenizer.decode([tokens[i]]).strip()] or places  # the space before is not
        start, end = (max(0.0, first + edge * step) for edge in (spans[heard[0]][0], spans[heard[-1]][1]))
        words.append(TimedWord(text, start, end))
    return words


def frame_times(model: SpeechModel) -> tuple[float, float]:
    """Where the encoder's first frame begins and how long each lasts: as long as it is to the next, around the middle
    of what it sees. Seconds, and before 0 where the first sees padding; of a text, tokens."""
    front_end, subsampling = model.front_end, model.transformer.encoder.subsampling
    if front_end.config.takes == "text":
        return 0.0, 1.0
    hop = front_end.config.hop_ms / 1000
    step = subsampling.factor * hop
    return front_end.centre + subsampling.centre * hop - step / 2, step
