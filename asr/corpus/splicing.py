"""New utterances from the words of old ones: some words of an utterance give way to others that the same speaker has
said, in the sound and in the transcript alike (Lam et al. 2021, "On-the-fly aligned data augmentation for
sequence-to-sequence ASR"). Words are drawn by how often they stand beside their neighbours elsewhere; a word that runs
into those beside it stays. A decoder that sees words in ever new order cannot learn the training set by heart."""

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
from asr.corpus.utterances import input_kind, read_cut

EDGE = ""  # stands before the first word and after the last
WINDOW = SAMPLE_RATE // 50  # samples over which loudness is measured
REACH = 0.04  # seconds that a cut may lie inside of what CTC hears of the words beside it
FADE = SAMPLE_RATE // 200  # samples in which one sound goes over into the next
APART = 10.0  # dB by which the sound at both edges of a word must be below the word's
UNSEEN = 0.1  # times that two words are taken to stand beside each other that never do
KEPT = 256  # utterances whose sound is kept in memory


class Spoken(NamedTuple):
    """A word where it was said."""

    text: str
    cut: MonoCut
    first: int  # sample
    end: int
    apart: bool  # it does not run into the words beside it


def splice(cuts: Iterable[MonoCut], share: float, rng: random.Random) -> Iterator[tuple[MonoCut, str, np.ndarray]]:
    """Each cut with a transcript and samples `(N,)` in which each word that stands apart was replaced with
    probability `share`.

    Raises ValueError for a cut without sound or without the times of its words (`asr.align`)."""
    read = lru_cache(KEPT)(lambda name: read_cut(by_name[name]))
    by_name, utterances, words_of, pairs = {}, [], defaultdict(list), Counter()
    for cut in cuts:
        by_name[cut.id] = cut
        utterance = _words(cut, read)
        utterances.append(utterance)
        pairs.update(pairwise([EDGE, *(word.text for word in utterance), EDGE]))
        words_of[cut.supervisions[0].speaker].extend(word for word in utterance if word.apart)
    for utterance in utterances:
        cut = utterance[0].cut
        choice = words_of[cut.supervisions[0].speaker]
        words: list[Spoken] = []
        for i, word in enumerate(utterance):
            if word.apart and rng.random() < share:
                before = words[-1].text if words else EDGE
                after = utterance[i + 1].text if i + 1 < len(utterance) else EDGE
                likely = [(UNSEEN + pairs[before, w.text]) * (UNSEEN + pairs[w.text, after]) for w in choice]
                word = rng.choices(choice, likely)[0]
            words.append(word)
        sound = read(cut.id)
        parts = [sound[: utterance[0].first]]
        parts += [read(word.cut.id)[word.first : word.end] for word in words]
        parts.append(sound[utterance[-1].end :])
        yield cut, " ".join(word.text for word in words), join(parts)


def join(parts: list[np.ndarray]) -> np.ndarray:
    """Samples `(N,)` of all parts, one after the other, each faded over into the next."""
    parts = [part for part in parts if len(part) > 2 * FADE]
    if not parts:
        return np.zeros(0, np.float32)
    up = np.linspace(0, 1, FADE, dtype=np.float32)
    joined = np.zeros(sum(map(len, parts)) - FADE * (len(parts) - 1), np.float32)
    place = 0
    for i, part in enumerate(parts):
        part = part.copy()
        if i:
            part[:FADE] *= up
        if i < len(parts) - 1:
            part[-FADE:] *= up[::-1]
        joined[place : place + len(part)] += part
        place += len(part) - FADE
    return joined


def quietest(samples: np.ndarray, first: int, end: int) -> int:
    """The middle of the quietest 20 ms of samples `(N,)` between `first` and `end`."""
    first, end = max(first, 0), min(end, len(samples))
    if end - first <= WINDOW:
        return (first + end) // 2
    energy = np.concatenate([[0.0], np.cumsum(np.square(samples[first:end], dtype=np.float64))])
    return first + int(np.argmin(energy[WINDOW:] - energy[:-WINDOW])) + WINDOW // 2


def _words(cut: MonoCut, read) -> list[Spoken]:
    """The words of a cut, each from the quietest place before it to the quietest after it."""
    items = (cut.supervisions[0].alignment or {}).get("word")
    if input_kind(cut) != "sound" or not items:
        raise ValueError(f"{cut.id}: the times of its words are not known (asr.align finds them)")
    samples = read(cut.id)
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
