"""Phrases that are likelier than the model thinks, as names and terms are: shallow fusion with a tree of their tokens
(Zhao et al. 2019, "Shallow-fusion end-to-end contextual biasing").

Each token that goes on with a phrase earns a bonus at once, so that the beam keeps the hypothesis; what a phrase has
earned that is not said to its end is taken back. A search looks a hypothesis' place in the tree up in a table, as it
does with a bigram: there is no loop over hypotheses or phrases.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from asr.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

SPACE = "\u2581"
LARGEST = 10**8  # numbers in a table


class Phrases(NamedTuple):
    """The tree of phrases as tables over N places in it and V tokens. A hypothesis begins in the place `start`."""

    gains: Tensor  # (N, V) what a token adds to the score of a hypothesis that is in a place
    places: Tensor  # (N, V) where it is then
    start: int

    @classmethod
    def of(cls, texts: Sequence[str], weight: float, tokenizer: Tokenizer, eos: int) -> Phrases | None:
        """Of normalised `texts`, none of them empty, with `weight` (a log-probability) for each token; None where none
        can be written. Raises ValueError for more phrases than a table can be made of."""
        V, unwritable = len(tokenizer), []
        children: list[dict[int, int]] = [{}]
        depth, ends = [0], [False]
        for text in texts:
            place, ids = 0, tokenizer.encode(f" {text}")
            if tokenizer.lacks_some(ids):
                unwritable.append(text)
                continue
            for token in ids:
                if token not in children[place]:
                    children[place][token] = len(children)
                    children.append({})
                    depth.append(depth[place] + 1)
                    ends.append(False)
                place = children[place][token]
            ends[place] = True
        if unwritable:
            logger.warning(
                "%d phrases have characters that the model cannot write, as %r", len(unwritable), *unwritable[:1]
            )
        if len(children) == 1:
            return None
        if len(children) * V > LARGEST:
            raise ValueError(f"phrases: {len(texts)} are too many for a vocabulary of {V} tokens")
        new_word = torch.tensor([tokenizer.piece(token).startswith(SPACE) or token == eos for token in range(V)])
        gains, places = torch.zeros(len(children), V), torch.zeros(len(children), V, dtype=torch.int64)
        depths, at_end = torch.tensor(depth), torch.zeros(len(children), V)
        kept, suffix = [0] * len(children), [0] * len(children)
        for place in sorted(range(len(children)), key=depth.__getitem__):
            # where a phrase is left: what its tokens have earned goes, but for those of a phrase that ended at a word's
            # end; the longest suffix with which a phrase begins goes on (Aho & Corasick 1975)
            own = torch.where(new_word, float(depth[place] if ends[place] else kept[place]), float(kept[place]))
            at_end[place] = own.maximum(at_end[suffix[place]])
            places[place] = places[suffix[place]]
            for token, child in children[place].items():
                suffix[child] = int(places[place, token]) if place else 0
                kept[child] = int(own[token])
                places[place, token] = child
            gains[place] = at_end[place] - depth[place] + depths[places[place]]
            gains[place, list(children[place])] = 1.0
        # where a space is a token of its own there is none before the first word
        apart = not tokenizer.piece(tokenizer.encode("a")[0]).startswith(SPACE)
        start = (
            next((place for token, place in children[0].items() if tokenizer.piece(token) == SPACE), 0) if apart else 0
        )
        return cls(weight * gains, places, start)

    def to(self, device: torch.device) -> Phrases:
        return Phrases(self.gains.to(device), self.places.to(device), self.start)

    def advance(self, place: Tensor, tokens: Tensor) -> Tensor:
        """Where hypotheses in `place (B, W)` are after `tokens (B, W)`."""
        return self.places.flatten()[place * self.places.shape[1] + tokens]
