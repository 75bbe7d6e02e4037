"""The times of the words of a transcript, from the likeliest CTC path that writes them (Viterbi)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asr.model.speech_model import SpeechModel
from asr.text.tokenizer import BLANK

NEVER = -1e9
KEPT = 2**27  # bytes of backpointers kept at once; more, as for an hour in one piece, are computed one part at a time

Span = tuple[float, float]  # the first encoder frame, and one past the last


@dataclass(frozen=True)
class TimedWord:
    """A word and when it is said."""

    text: str
    start: float  # seconds from the start of the input (tokens, if that is text)
    end: float


def ctc_alignments(log_probs: Tensor, lens: Tensor, tokens: Sequence[Sequence[int]]) -> list[list[Span] | None]:
    """The frames of each token on the likeliest path of each utterance, from log_probs `(B, M, V)`, lens `(B,)` and the
    tokens of B transcripts. None for an utterance with too few frames for its transcript.

    With many frames and states, only the scores at the start of each part of the frames are kept, and the backpointers
    within a part are computed again on the way back."""
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
    outside = torch.full((B, 2), NEVER, dtype=torch.double)

    def advance(score: Tensor, frames: range) -> tuple[Tensor, Tensor]:
        """Scores `(B, S)` after these frames, and how many states back the best path to each came from, `(n, B, S)`."""
        came = torch.empty(len(frames), B, S, dtype=torch.int8)
        for i, t in enumerate(frames):
            before = torch.cat([outside, score], dim=1)
            ways = torch.stack([before[:, 2:], before[:, 1:-1], before[:, :-2].masked_fill(~skips, NEVER)])
            best, back = ways.max(dim=0)
            inside = (t < lens)[:, None]
            score = torch.where(inside, best + log_probs[:, t].gather(1, labels), score)
            came[i] = back.masked_fill_(~inside, 0)
        return score, came

    score = torch.full((B, S), NEVER, dtype=torch.double)
    score[:, :2] = log_probs[:, 0].gather(1, labels[:, :2])
    size = max(1, KEPT // (B * S))
    parts, scores = [range(first, min(first + size, M)) for first in range(1, M, size)], []
    for frames in parts:
        scores.append(score)
        score, came = advance(score, frames)
    rows = torch.arange(B)
    last = torch.stack([2 * counts, (2 * counts - 1).clamp(min=0)])
    final, which = score[rows, last].max(dim=0)
    state = last[which, rows]
    path = torch.empty(M, B, dtype=torch.int64)
    for frames, score in zip(reversed(parts), reversed(scores), strict=True):
        if frames is not parts[-1]:
            _, came = advance(score, frames)
        for i in reversed(range(len(frames))):
            path[frames[i]] = state
            state = state - came[i, rows, state]
    path[0] = state
    return [
        _spans(path[:length, b].numpy(), count) if not count or (length and likely) else None
        for b, (count, length, likely) in enumerate(
            zip(counts.tolist(), lens.tolist(), (final > NEVER / 2).tolist(), strict=True)
        )
    ]


def _spans(path: np.ndarray, count: int) -> list[Span]:
    """The frames of each of `count` tokens on a path `(M,)` through their states that never goes back."""
    states = 2 * np.arange(count) + 1
    first, end = np.searchsorted(path, states, "left"), np.searchsorted(path, states, "right")
    return list(zip(first.tolist(), end.tolist(), strict=True))


def timed_words(model: SpeechModel, tokens: Sequence[int], spans: Sequence[Span]) -> list[TimedWord]:
    """The words of `tokens`, each from the start of its first token's frames to the end of its last token's: where CTC
    hears the word, which is shorter than it sounds."""
    first, step = frame_times(model)
    words = []
    for text, part in model.tokenizer.words(tokens):
        places = range(part.start, part.stop)
        heard = [i for i in places if model.tokenizer.decode([tokens[i]]).strip()] or places  # not the space before it
        start, end = (max(0.0, first + edge * step) for edge in (spans[heard[0]][0], spans[heard[-1]][1]))
        words.append(TimedWord(text, start, end))
    return words


def frame_times(model: SpeechModel) -> tuple[float, float]:
    """The start of the encoder's first frame and the length of each, in seconds (in tokens for text). A frame lasts as
    long as it is to the next, around the middle of what it sees; the first starts before 0 if it sees padding."""
    front_end, subsampling = model.front_end, model.transformer.encoder.subsampling
    if front_end.config.takes == "text":
        return 0.0, 1.0
    hop = front_end.config.hop_ms / 1000
    step = subsampling.factor * hop
    return front_end.centre + subsampling.centre * hop - step / 2, step
