"""A model's tokens exchanged for others: each begins as the mean of those that wrote it before (fast vocabulary
transfer, Gee et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from asr.text.tokenizer import SPECIALS, Tokenizer


def transfer_vocabulary(
    weights: Mapping[str, Tensor], known: Mapping[str, Tensor], tokenizer: Tokenizer, origin: Tokenizer
) -> None:
    """Sets the rows of `weights`, each `(V, ...)` for the tokens of `tokenizer`, from those of the same name in
    `known`, `(V', ...)` for the tokens of `origin`, in place. What `origin` cannot write stays as it is, and what
    `known` lacks."""
    parts = _written_by(origin, tokenizer)
    ours = [token for token, part in enumerate(parts) if part]
    ids = torch.tensor([i for part in parts for i in part], dtype=torch.long)
    starts = torch.tensor([0, *(len(parts[token]) for token in ours)]).cumsum(0)[:-1]
    for name, rows in weights.items():
        if name in known:
            means = F.embedding_bag(ids, known[name].reshape(len(known[name]), -1), starts)
            rows[ours] = means.view(len(ours), *rows.shape[1:])


def _written_by(origin: Tokenizer, tokenizer: Tokenizer) -> list[list[int]]:
    """For each token of `tokenizer` those of `origin` that write it; none where there are no such."""
    ids = {origin.piece(i): i for i in range(len(origin))}
    pieces = [tokenizer.piece(i) for i in range(len(tokenizer))]
    names, written = pieces[: len(SPECIALS)], pieces[len(SPECIALS) :]  # a special symbol's name is not what it writes
    return [*([ids[name]] if name in ids else [] for name in names), *(_longest_first(piece, ids) for piece in written)]


def _longest_first(piece: str, ids: Mapping[str, int]) -> list[int]:
    """The ids of what `piece` is made of, always the longest that fits; none where nothing does."""
    found = []
    while piece:
        length = next((n for n in range(len(piece), 0, -1) if piece[:n] in ids), 0)
        if not length:
            return []
        found.append(ids[piece[:length]])
        piece = piece[length:]
    return found
