"""Phrases that are likelier than the model thinks, such as names and terms: shallow fusion with a tree of their tokens
(Zhao et al. 2019, "Shallow-fusion end-to-end contextual biasing").

Each token that continues a phrase earns a bonus at once, so that the beam keeps the hypothesis; the bonus of a phrase
that is not completed is taken back. A search looks up a hypothesis' place in the tree in a table, as it does with a
bigram: there is no loop over hypotheses or phrases.
"""

from __future__ import annotations

import logging
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asr.text.tokenizer import Tokenizer
from asr.text.words import SPACE, is_unspaced

logger = logging.getLogger(__name__)

LARGEST = 5 * 10**7  # most numbers in a table
STRANGE = "\ue000"  # a letter that is in no vocabulary and in no phrase
INSIDE = "'\u2019-\u200c\u200d"  # apostrophes, the hyphen and joiners stand between the letters of a word


class Phrases(NamedTuple):
    """The tree of phrases as tables over its N places and V tokens. A hypothesis starts in the place `start`."""

    gains: Tensor  # (N, V) what a token adds to the score of a hypothesis in a place
    places: Tensor  # (N, V) the place of the hypothesis after the token
    start: int

    @classmethod
    def of(cls, texts: Sequence[Iterable[str]], weight: float, tokenizer: Tokenizer) -> Phrases | None:
        """The tables for `texts`, which hold the ways to write each phrase, none of them empty; each token of a phrase
        adds `weight` (a log-probability). None if no phrase can be written. Raises ValueError for too many phrases.

        A phrase consists of whole words; one in a script without spaces may start and end anywhere, as may all phrases
        if the vocabulary has no space."""
        spaced = not tokenizer.lacks_some(tokenizer.encode(" "))
        tree, unwritable = _Tree(tokenizer), []
        for ways in texts:
            rows = [row for text in ways for row in _writings(tokenizer, text, spaced)]
            rows = [row for row in rows if not tokenizer.lacks_some(row)]
            if not rows:
                unwritable.append(next(iter(ways)))
            for row in rows:
                tree.add(row)
        if unwritable:
            said = "%d phrases have characters that the model cannot write, as %r"
            logger.warning(said, len(unwritable), unwritable[0])
        V, root = len(tokenizer), tree.children[0]
        if not root:
            return None
        if len(tree.children) * V > LARGEST:
            raise ValueError(f"phrases: {len(texts)} are too many for a vocabulary of {V} tokens")
        after_a_word = np.array([not spaced or _ends_a_word(tokenizer.piece(token)) for token in range(V)])
        earned, places = map(torch.from_numpy, tree.tables(after_a_word))
        # if a space is a token of its own, there is none before the first word
        apart = spaced and not tokenizer.piece(tokenizer.encode("a")[0]).startswith(SPACE)
        first = {tokenizer.piece(token): child for token, child in root.items()}
        return cls(weight * (earned - torch.tensor(tree.depth)[:, None]), places, first.get(SPACE, 0) if apart else 0)

    def to(self, device: torch.device) -> Phrases:
        return Phrases(self.gains.to(device), self.places.to(device), self.start)

    def advance(self, place: Tensor, tokens: Tensor) -> Tensor:
        """The places of hypotheses in `place (...)` after `tokens (...)`."""
        return self.places.flatten()[place * self.places.shape[1] + tokens].long()

    def along(self, labels: Tensor) -> Tensor:
        """The gains `(n, U)` of whole hypotheses: what each of their `labels (n, U)` adds."""
        place = torch.full_like(labels[:, 0], self.start)
        added = []
        for token in labels.unbind(dim=1):
            added.append(self.gains[place, token])
            place = self.advance(place, token)
        return torch.stack(added, dim=1)


class _Tree:
    """A prefix tree of the tokens of phrases: a place for each prefix, the empty one first."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.children: list[dict[int, int]] = [{}]  # for each place: the next tokens, and the places they lead to
        self.depth = [0]  # tokens up to each place
        self.ends = [False]  # whether a phrase is complete there
        self.unspaced = [False]  # whether its last letter belongs to a script without spaces

    def add(self, phrase: list[int]) -> None:
        place = 0
        for token in phrase:
            if token not in self.children[place]:
                self.children[place][token] = len(self.children)
                self.children.append({})
                self.depth.append(self.depth[place] + 1)
                self.ends.append(False)
                self.unspaced.append(is_unspaced(self.tokenizer.piece(token)[-1]))
            place = self.children[place][token]
        self.ends[place] = True

    def tables(self, after_a_word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each of N places and V tokens, `(N, V)` each: of the tokens from the root to the place and this one, how
        many count, because their phrases are complete or still under way; and the next place. `after_a_word (V,)`:
        whether a word has ended before each token.

        When a phrase is left, a shorter phrase that it starts with still counts if a word ended there, and the tokens
        behind that count for phrases that started later: the hypothesis is where it would be without the longer phrase
        (Aho & Corasick 1975)."""
        N, V = len(self.children), len(after_a_word)
        earned, places = np.zeros((N, V), np.float32), np.zeros((N, V), np.int32)
        without = [(0, 0)] * N  # for each place: how many tokens still count if the phrase is left, and the next place
        for place in sorted(range(N), key=self.depth.__getitem__):
            unspaced = self.unspaced[place]
            within_a_word = without[place]
            at_its_end = (self.depth[place], 0) if self.ends[place] else within_a_word
            if place:
                at_end = np.ones_like(after_a_word) if unspaced else after_a_word
                for (tokens, left), here in ((within_a_word, ~at_end), (at_its_end, at_end)):
                    earned[place, here] = tokens - self.depth[left] + earned[left, here]
                    places[place, here] = places[left, here]
            for token, child in self.children[place].items():
                if place:
                    tokens, left = at_its_end if unspaced or after_a_word[token] else within_a_word
                    without[child] = tokens - self.depth[left] + int(earned[left, token]), int(places[left, token])
                earned[place, token], places[place, token] = self.depth[child], child
        return earned, places


def _writings(tokenizer: Tokenizer, text: str, spaced: bool) -> list[list[int]]:
    """The ways to tokenise a phrase: after a space, if the vocabulary has one, and also directly after another letter,
    if the phrase starts with a letter of a script without spaces."""
    rows = [tokenizer.encode(f" {text}" if spaced else text)]
    if spaced and is_unspaced(text[0]):
        row = tokenizer.encode(f"{STRANGE}{text}")
        rows += [row[i:] for i in range(len(row)) if tokenizer.decode(row[i:]) == text]
    return rows


def _ends_a_word(piece: str) -> bool:
    """Whether a word has ended before this token: a space, punctuation, a letter of a script without spaces, or a
    special symbol or timestamp, which begins with a bracket."""
    goes_on = unicodedata.category(piece[0])[0] in "LMN" or piece[0] in INSIDE  # M: vowel signs, accents
    return is_unspaced(piece[0]) or not goes_on
