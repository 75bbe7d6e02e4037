"""New utterances from the words of old ones: some words of an utterance are replaced with others that the same speaker
has said, both in the audio and in the transcript (Lam et al. 2021, "On-the-fly aligned data augmentation for
sequence-to-sequence ASR"). Words are drawn by how often they stand next to their neighbours in other utterances; a word
that runs into its neighbours is kept. A decoder that sees words in ever new order cannot learn the training set by
heart.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from lhotse import MonoCut

from asr.audio.reading import SAMPLE_RATE
from asr.corpus.utterances import Skipped, iterate, read_cut, word_times
from asr.text.words import join_words

EDGE = ""  # stands before the first word and after the last
WINDOW = SAMPLE_RATE // 50  # samples over which loudness is measured
REACH = 0.04  # seconds by which a cut may lie inside the times that CTC gives the words next to it
FADE = SAMPLE_RATE // 200  # samples of the crossfade from one piece to the next
APART = 10.0  # dB by which the audio at both edges of a word must be below the word
UNSEEN = 0.1  # added to the counts of pairs of words, so that pairs that never occur are possible
KEPT = 256  # utterances whose audio is kept in memory


class Spoken(NamedTuple):
    """A word and where it was said."""

    text: str
    cut: MonoCut
    first: int  # sample
    end: int
    apart: bool  # whether it does not run into its neighbours


def splice(
    cuts: Iterable[MonoCut], share: float, rng: random.Random, copies: int = 1
) -> Iterator[tuple[MonoCut, str, np.ndarray]]:
    """Each cut with a transcript and samples `(N,)` in which each word that stands apart was drawn again with
    probability `share`, then each once more, until there are so many `copies`; cuts that cannot be read, or whose
    speaker is not known, are reported by name and left out.

    Raises ValueError for a cut without audio or without the times of its words (`asr.align`), or if none is left."""
    read = lru_cache(KEPT)(lambda name: read_cut(by_name[name]))
    by_name: dict[str, MonoCut] = {}
    utterances: list[list[Spoken]] = []
    pairs: Counter[tuple[str, str]] = Counter()
    said: dict[str, dict[str, list[Spoken]]] = defaultdict(lambda: defaultdict(list))  # by speaker and by word
    skipped = Skipped("splicing")
    for cut, samples in iterate(cuts, skipped):
        if not cut.supervisions[0].speaker:
            skipped.add(cut.id, "its speaker is not known, and words are of one voice")
            continue
        words = _words(cut, samples)
        by_name[cut.id] = cut
        utterances.append(words)
        pairs.update(_pairs(words))
        for word in words:
            if word.apart:
                said[cut.supervisions[0].speaker][word.text].append(word)
    skipped.report()
    if not utterances:
        raise ValueError("no utterance is left to splice")
    for words in utterances * copies:
        cut = words[0].cut
        own, choice = Counter(_pairs(words)), said[cut.supervisions[0].speaker]

        def elsewhere(*pair: str, own=own) -> float:
            return UNSEEN + pairs[pair] - own[pair]

        first = Spoken(EDGE, cut, 0, words[0].first, False)
        last = Spoken(EDGE, cut, words[-1].end, len(read(cut.id)), False)
        drawn = [first]
        for word, after in pairwise([*words, last]):
            if word.apart and rng.random() < share:
                before = drawn[-1].text
                likely = [
                    len(spoken) * elsewhere(before, text) * elsewhere(text, after.text)
                    for text, spoken in choice.items()
                ]
                [spoken] = rng.choices(list(choice.values()), likely)
                word = rng.choice(spoken)
            drawn.append(word)
        pieces = [read(name)[start:end] for name, start, end in _runs([*drawn, last])]
        yield cut, join_words(word.text for word in drawn[1:]), join(pieces)


def _pairs(words: list[Spoken]) -> Iterator[tuple[str, str]]:
    return pairwise([EDGE, *(word.text for word in words), EDGE])


def _runs(words: list[Spoken]) -> Iterator[tuple[str, int, int]]:
    """The spans of audio that the words are made of: utterance, first sample and end; neighbours share a span."""
    name, first, end = words[0].cut.id, words[0].first, words[0].end
    for word in words[1:]:
        if word.cut.id == name and word.first == end:
            end = word.end
            continue
        yield name, first, end
        name, first, end = word.cut.id, word.first, word.end
    yield name, first, end


def join(pieces: list[np.ndarray]) -> np.ndarray:
    """Samples `(N,)` of all pieces, one after the other, each crossfaded into the next."""
    pieces = [piece for piece in pieces if len(piece) > 2 * FADE]
    if not pieces:
        return np.zeros(0, np.float32)
    up = np.linspace(0, 1, FADE, dtype=np.float32)
    joined = np.zeros(sum(map(len, pieces)) - FADE * (len(pieces) - 1), np.float32)
    place = 0
    for i, piece in enumerate(pieces):
        faded = piece.copy()
        if i:
            faded[:FADE] *= up
        if i < len(pieces) - 1:
            faded[-FADE:] *= up[::-1]
        joined[place : place + len(faded)] += faded
        place += len(faded) - FADE
    return joined


def quietest(samples: np.ndarray, first: int, end: int) -> int:
    """The middle of the quietest 20 ms of samples `(N,)` between `first` and `end`."""
    first, end = max(first, 0), min(end, len(samples))
    if end - first <= WINDOW:
        return (first + end) // 2
    energy = np.concatenate([[0.0], np.cumsum(np.square(samples[first:end], dtype=np.float64))])
    return first + int(np.argmin(energy[WINDOW:] - energy[:-WINDOW])) + WINDOW // 2


def _words(cut: MonoCut, samples: np.ndarray) -> list[Spoken]:
    """The words of a cut, each from the quietest place before it to the quietest after it."""
    items = word_times(cut)
    reaches = [min(REACH, item.duration / 2) for item in items]
    ends = [0.0, *(item.end - reach for item, reach in zip(items, reaches, strict=True))]
    starts = [*(item.start + reach for item, reach in zip(items, reaches, strict=True)), len(samples) / SAMPLE_RATE]
    places = [
        quietest(samples, round(left * SAMPLE_RATE), round(right * SAMPLE_RATE))
        for left, right in zip(ends, starts, strict=True)
    ]
    return [
        Spoken(item.symbol, cut, first, end, _is_apart(samples, first, end))
        for item, (first, end) in zip(items, pairwise(places), strict=True)
    ]


def _is_apart(samples: np.ndarray, first: int, end: int) -> bool:
    if end - first < 2 * WINDOW:
        return False
    edges = max(_power(samples[max(0, place - WINDOW // 2) : place + WINDOW // 2]) for place in (first, end))
    return edges < _power(samples[first:end]) * 10 ** (-APART / 10)


def _power(samples: np.ndarray) -> float:
    return float(np.mean(np.square(samples, dtype=np.float64)))
