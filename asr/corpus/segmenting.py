"""Splitting long recordings with transcripts into utterances for training: cut in the pauses between words, whose times
`asr.align` has found."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, takewhile

from lhotse import MonoCut, SupervisionSegment
from lhotse.supervision import AlignmentItem
from lhotse.utils import fastcopy

from asr.corpus.utterances import word_times
from asr.text.words import join_words

MARGIN = 0.3  # most seconds of a pause that are kept on either side of an utterance
EARLIEST = 0.4  # fraction of its maximum length from which on an utterance may end


def segment(cut: MonoCut, longest: float) -> Iterator[MonoCut]:
    """Splits a cut into parts of at most `longest` seconds, each from pause to pause, with the words said in it and
    their times; a part ends in the longest pause that it reaches. What lies between two parts, beyond the margins, is
    left out.

    A word that is itself longer is a part of its own. Raises ValueError for a cut without audio or without the times
    of its words."""
    words = word_times(cut)
    places = [0.0, *(before.end / 2 + after.start / 2 for before, after in pairwise(words)), cut.duration]
    first = 0
    while first < len(words):
        begin = max(places[first], words[first].start - MARGIN)
        later = range(first + 1, len(words) + 1)
        ends = list(takewhile(lambda i, latest=begin + longest: _end(places, words, i) <= latest, later))
        last = first + 1
        if ends and ends[-1] == len(words):
            last = len(words)
        elif ends:
            late = [i for i in ends if _end(places, words, i) - begin >= EARLIEST * longest] or ends[-1:]
            last = max(late, key=lambda i: words[i].start - words[i - 1].end)
        yield _part(cut, first, begin, _end(places, words, last), words[first:last])
        first = last


def _end(places: list[float], words: list[AlignmentItem], last: int) -> float:
    """Where a part ends if `last` is the first word after it."""
    return min(places[last], words[last - 1].end + MARGIN)


def _part(cut: MonoCut, number: int, begin: float, end: float, words: list[AlignmentItem]) -> MonoCut:
    said = cut.supervisions[0]
    name, duration = f"{cut.id}-{number}", round(end - begin, 3)
    supervision = SupervisionSegment(
        id=name,
        recording_id=said.recording_id,
        start=0.0,
        duration=duration,
        text=join_words(word.symbol for word in words),
        speaker=said.speaker,
        language=said.language,
        alignment={"word": [word._replace(start=round(word.start - begin, 3)) for word in words]},
    )
    return fastcopy(cut, id=name, start=cut.start + begin, duration=duration, supervisions=[supervision])
