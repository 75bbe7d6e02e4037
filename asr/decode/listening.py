"""Sound that is still coming in: drafts of what is being said, and each piece for good as soon as a pause ends it.

A draft is made of all of the piece so far, by a quicker search. Its words are settled as far as the next draft, which
has heard more, agrees: local agreement (Liu et al. 2020, "Low-Latency Sequence-to-Sequence Speech Recognition and
Translation by Partial Hypothesis Selection").
"""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from asr.audio.reading import SAMPLE_RATE
from asr.decode.options import Hypothesis
from asr.decode.recognizer import Recognizer
from asr.decode.recordings import sound_of
from asr.decode.segments import MARGIN, Cutter, Piece, SpeechDetector
from asr.decode.transcript import Segment
from asr.text.words import join_words

EVERY = 0.5  # seconds of new sound between two drafts, at least
TURN = 0.1  # and between two looks for a pause
PAUSE = 0.5  # seconds of silence that end a piece
MOST_BYTES = 2**20  # of sound that are worked on at a time
DRAFTS = ("rescore", "greedy", "ctc")  # strategies of drafts

Decode = Callable[[Recognizer, list[np.ndarray]], list[list[Hypothesis]]]


@dataclass(frozen=True)
class Heard:
    """What is known at a time."""

    segments: list[Segment] = field(default_factory=list)  # of a piece that has ended, for good
    start: float | None = None  # seconds to where the piece begins that is being spoken; None: nobody speaks
    settled: str = ""  # the words of that piece that later drafts hardly change: they are only added to
    tentative: str = ""  # and the others


def listen(
    recognizer: Recognizer,
    blocks: Iterable[np.ndarray],
    drafter: Recognizer | None = None,
    every: float = EVERY,
    pause: float = PAUSE,
    decode: Decode = Recognizer.recognize,
    rest: float = 0.0,
) -> Iterator[Heard]:
    """What is heard in sound that comes in blocks of any size: samples `(N,)` at 16 kHz, in the forms that
    `Recognizer.transcribe` takes. A piece ends in `pause` seconds of silence, and is then heard for good.

    `drafter` (`drafter_of`) says before that what is being said, every `every` seconds, or less often where it is slow;
    after a draft there is none for `rest` times as long as it took, for others to be heard. `blocks` is asked for the
    next when the last was worked on, and should then give all that has come in (`drained`). `decode` gives the
    hypotheses of a batch of pieces (`SharedRecognizer.recognize`). Raises ValueError for a model that does not hear
    sound, or for times that cannot be; AudioError for samples that cannot."""
    if recognizer.takes != "sound":
        raise ValueError(f"this model takes {recognizer.takes}, not sound")
    if not MARGIN <= pause < math.inf:
        raise ValueError(f"pause must be at least {MARGIN} s and finite, not {pause}")
    if not 0 < every < math.inf:
        raise ValueError(f"every must be positive and finite, not {every}")
    cutter, draft = Cutter(recognizer.piece_seconds, pause, SpeechDetector()), _Draft()
    new, wanted = 0.0, every  # seconds of speech since the last draft, and those to the next
    least, most = (round(seconds * SAMPLE_RATE) for seconds in (TURN, recognizer.piece_seconds))
    for fresh, last in _turns(blocks, least, most):
        if pieces := list(cutter.cut(fresh, last)):
            draft = _Draft()
            for each in zip(pieces, decode(recognizer, [piece.samples for piece in pieces]), strict=True):
                yield Heard([segment for segment in recognizer.segments(*each) if segment.words])
        new = new + len(fresh) / SAMPLE_RATE if cutter.speaks else 0.0
        if drafter and new >= wanted and not last:
            piece, began = Piece(cutter.start / SAMPLE_RATE, cutter.rest), time.monotonic()
            [found] = decode(drafter, [piece.samples])
            new, wanted = 0.0, max(every, rest * (time.monotonic() - began))
            if draft.is_news([word.text for part in drafter.segments(piece, found) for word in part.words]):
                yield Heard([], piece.start, draft.settled, draft.tentative)


def drafter_of(recognizer: Recognizer, strategy: str | None = None) -> Recognizer:
    """The same model with a quicker search, of `DRAFTS` (None: rescore, or greedy where CTC has no part). Raises
    ValueError for one that the model cannot do."""
    if strategy is None:
        strategy = "rescore" if recognizer.model.transformer.ctc and recognizer.options.ctc_weight else "greedy"
    options = {"strategy": strategy, "nbest": 1, "temperature": 0.0, "fallback": ()}
    if strategy == "ctc":
        options |= {"beam_size": 1, "lm_weight": 0.0, "ilm_weight": 0.0, "phrases": ()}  # the likeliest path
    drafter = recognizer.with_options(**options)
    drafter.word_times = False
    return drafter


class _Draft:
    """The words of a piece that is being spoken, as far as they are known."""

    def __init__(self):
        self.agreed: list[str] = []
        self.others: list[str] = []  # the last draft's, behind as many

    def is_news(self, words: list[str]) -> bool:
        """Takes another draft; whether it says something new."""
        before = self.settled, self.tentative
        fresh = words[len(self.agreed) :]
        both = takewhile(lambda pair: pair[0] == pair[1], zip(self.others, fresh, strict=False))
        count = sum(1 for _ in both)
        self.agreed, self.others = self.agreed + fresh[:count], fresh[count:]
        return before != (self.settled, self.tentative)

    @property
    def settled(self) -> str:
        return join_words(self.agreed)

    @property
    def tentative(self) -> str:
        return join_words(self.others)


def _turns(blocks: Iterable[np.ndarray], least: int, most: int) -> Iterator[tuple[np.ndarray, bool]]:
    """What has come in, from `least` to `most` samples at a time, and whether that is the last, which may have less."""
    waiting = np.zeros(0, np.float32)
    for block in blocks:
        waiting = np.concatenate([waiting, *sound_of(block)])
        while len(waiting) >= least:
            yield waiting[:most], False
            waiting = waiting[most:]
    yield waiting, True


def drained(inbox: queue.Queue[bytes | None]) -> Iterator[np.ndarray]:
    """Samples `(N,)`, float32, of raw ones of 16 bits (little-endian, one channel), whose bytes another thread puts in:
    all that it has put in since the last time, as one block of hardly more than `MOST_BYTES`. None ends them."""
    raw, block = b"", b""
    while block is not None:
        waiting, size = [raw], 0  # of a sample the first half may have come
        block = inbox.get()
        while block is not None:
            waiting.append(block)
            size += len(block)
            if size >= MOST_BYTES or inbox.empty():
                break
            block = inbox.get()
        raw = b"".join(waiting)
        yield np.frombuffer(raw, "<i2", len(raw) // 2).astype(np.float32) / 32768
        raw = raw[len(raw) // 2 * 2 :]
