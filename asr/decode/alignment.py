"""Where the tokens of a transcript lie in time: the likeliest path through CTC that writes them (Viterbi)."""

from __future__ import annotations

import torch
from torch import Tensor

from asr.text.tokenizer import BLANK

NEVER = -1e9


def ctc_alignment(log_probs: Tensor, tokens: list[int]) -> list[tuple[int, int]]:
    """First frame and one past the last of each of `tokens` on the likeliest path; `log_probs (M, V)`.

    Raises ValueError where M frames are too few for them."""
    M, U = len(log_probs), len(tokens)
    if not U:
        return []
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
