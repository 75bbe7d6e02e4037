"""Exchanging a model's tokens: each new token starts as the mean of the old ones that spell it (fast vocabulary
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
    """Sets the rows of `weights`, each `(V, ...)` for the tokens of `tokenizer`, in place from the weights of the same
    name in `known`, `(V', ...)` for the tokens of `origin`. The rows of tokens that `origin` cannot write are left
    unchanged, and so are weights that `known` lacks."""
    parts = _written_by(origin, tokenizer)
    ours = [token for token, part in enumerate(parts) if part]
    ids = torch.tensor([i for part in parts for i in part], dtype=torch.long)
    starts = torch.tensor([0, *(len(parts[token]) for token in ours)]).cumsum(0)[:-1]
    for name, rows in weights.items():
        if name in known:
            means = F.embedding_bag(ids, known[name].reshape(len(known[name]), -1), starts)
            rows[ours] = means.view(len(ours), *rows.shape[1:])


def _written_by(origin: Tokenizer, tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of `origin` that spell each token of `tokenizer`; empty if there are none."""
    ids = {origin.piece(i): i for i in range(len(origin))}
    pieces = [tokenizer.piece(i) for i in range(len(tokenizer))]
    names, written = pieces[: len(SPECIALS)], pieces[len(SPECIALS) :]  # a special symbol's name is not what it writes
    return [*([ids[name]] if name in ids else [] for name in names), *(_longest_first(piece, ids) for piece in written)]


def _longest_first(piece: str, ids: Mapping[str, int]) -> list[int]:
    """The ids of the tokens that spell `piece`, always the longest that fits; empty if none fits."""
    found = []
    while piece:
        length = next((n for n in range(len(piece), 0, -1) if piece[:n] in ids), 0)
        if not length:
            return []
        found.append(ids[piece[:length]])
        piece = piece[length:]
    return found
