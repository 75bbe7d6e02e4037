"""Where the words of a transcript lie in time: the likeliest path through CTC that writes them (Viterbi)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asr.decode.recognizer import Recognizer
from asr.text.tokenizer import BLANK

NEVER = -1e9


@dataclass(frozen=True)
class TimedWord:
    text: str
    start: float  # seconds (of a text: tokens) from the beginning
    end: float


@torch.inference_mode()
def align(recognizer: Recognizer, inputs: list[np.ndarray], transcripts: list[str]) -> list[list[TimedWord] | None]:
    """When each word of the transcripts of a batch is said: samples `(N,)` at 16 kHz or matrices `(T, d)` and their
    texts, normalised. A word lasts from where CTC hears its first token to where it hears its last, which is less than
    it sounds. None where the model has too few frames for the text.

    Raises ValueError for a model without CTC."""
    transformer, tokenizer = recognizer.model.transformer, recognizer.model.tokenizer
    if not transformer.ctc:
        raise ValueError("words are found in time by CTC, and this model has none")
    memory, memory_lens = transformer.encoder(*recognizer.features(inputs))
    log_probs = transformer.ctc_log_probs(memory).float().cpu()
    found = []
    for scores, length, text in zip(log_probs, memory_lens.tolist(), transcripts, strict=True):
        tokens = tokenizer.encode(text)
        try:
            spans = ctc_alignment(scores[:length], tokens)
        except ValueError:
            found.append(None)
        else:
            found.append(timed_words(recognizer, tokens, spans))
    return found


def timed_words(recognizer: Recognizer, tokens: list[int], spans: list[tuple[float, float]]) -> list[TimedWord]:
    """The words of `tokens`, each from the encoder frame in which its first begins to that in which its last ends."""
    first, step = frame_times(recognizer)
    tokenizer, words = recognizer.model.tokenizer, []
    for text, part in tokenizer.words(tokens):
        places = range(part.start, part.stop)
        heard = [i for i in places if tokenizer.decode([tokens[i]]).strip()] or places  # the space before it is not
        words.append(TimedWord(text, first + spans[heard[0]][0] * step, first + spans[heard[-1]][1] * step))
    return words


def frame_times(recognizer: Recognizer) -> tuple[float, float]:
    """Where the encoder's first frame begins and how long each lasts: it stands for the features in the middle of what
    it sees, each of those for a hop in the middle of its window. Seconds; of a text, tokens."""
    front_end, subsampling = recognizer.model.front_end.config, recognizer.model.transformer.encoder.subsampling
    if recognizer.takes == "text":
        return 0.0, 1.0
    hop = front_end.hop_ms / 1000
    before = (front_end.window_ms / 1000 - hop) / 2 if recognizer.takes == "sound" else 0.0
    return before + subsampling.first_centre * hop, subsampling.factor * hop


def ctc_alignment(log_probs: Tensor, tokens: list[int]) -> list[tuple[int, int]]:
    """First frame and one past the last of each of `tokens` on the likeliest path; `log_probs (M, V)`.

    Raises ValueError where M frames are too few for them."""
    M, U = len(log_probs), len(tokens)
    if not U:
        return []
    if not M:
        raise ValueError(f"0 frames are too few for {U} tokens")
    labels = torch.full((2 * U + 1,), BLANK)
    labels[1::2] = torch.tensor(tokens)
    skips = torch.zeros(2 * U + 1, dtype=torch.bool)  # over the blank between two different tokens
    skips[3::2] = labels[3::2] != labels[1:-2:2]
    emitted = log_probs.double().cpu()[:, labels]
    score = torch.full((2 * U + 1,), NEVER, dtype=torch.double)
    score[:2] = emitted[0, :2]
    came = torch.zeros(M, 2 * U + 1, dtype=torch.int64)  # from how many states back
    start = torch.full((2,), NEVER, dtype=torch.double)
    for t in range(1, M):
        before = torch.cat([start, score])
        ways = torch.stack([before[2:], before[1:-1], before[:-2].where(skips, NEVER)])
        score, came[t] = ways.max(dim=0)
        score = score + emitted[t]
    state = 2 * U if score[2 * U] > score[2 * U - 1] else 2 * U - 1
    if score[state] <= NEVER / 2:
        raise ValueError(f"{M} frames are too few for {U} tokens")
    path = [state]
    for t in range(M - 1, 0, -1):
        path.append(path[-1] - int(came[t, path[-1]]))
    frames = torch.tensor(path[::-1])
    spans = []
    for u in range(U):
        own = (frames == 2 * u + 1).nonzero()[:, 0]
        spans.append((int(own[0]), int(own[-1]) + 1))
    return spans
