"""Live transcription: drafts of what is being said, and the final text of each piece as soon as a pause ends it.

A draft is made from the whole piece so far, by a faster search. Its words are settled as far as the next draft, which
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

EVERY = 0.5  # minimum seconds of new audio between two drafts
TURN = 0.1  # and between two searches for a pause
PAUSE = 0.5  # seconds of silence that end a piece
MOST_BYTES = 2**20  # of audio that are processed at once
DRAFTS = ("rescore", "greedy", "ctc")  # search strategies for drafts

Decode = Callable[[Recognizer, list[np.ndarray]], list[list[Hypothesis]]]


@dataclass(frozen=True)
class Heard:
    """What has been heard at one moment."""

    segments: list[Segment] = field(default_factory=list)  # final, of a piece that has ended
    start: float | None = None  # of the piece that is being spoken, in seconds; None: nobody speaks
    settled: str = ""  # the words of that piece that later drafts do not change: they only add to them
    tentative: str = ""  # and its other words


def listen(
    recognizer: Recognizer,
    blocks: Iterable[np.ndarray],
    drafter: Recognizer | None = None,
    every: float = EVERY,
    pause: float = PAUSE,
    decode: Decode = Recognizer.recognize,
    rest: float = 0.0,
) -> Iterator[Heard]:
    """What is heard in audio that arrives in blocks of any size: samples `(N,)` at 16 kHz, in the forms that
    `Recognizer.transcribe` accepts. A piece ends in `pause` seconds of silence, which makes its text final.

    Until then, `drafter` (`drafter_of`) drafts what is being said every `every` seconds, or less often if it is slow;
    after a draft it rests for `rest` times as long as the draft took, so that others get their turn. `blocks` is asked
    for the next block when the last one has been processed, and should then give all that has arrived (`drained`).
    `decode` returns the hypotheses of a batch of pieces (`SharedRecognizer.recognize`). Raises ValueError for a model
    that does not hear audio or for impossible times, AudioError for impossible samples."""
    if recognizer.takes != "sound":
        raise ValueError(f"this model takes {recognizer.takes}, not sound")
    if not MARGIN <= pause < math.inf:
        raise ValueError(f"pause must be at least {MARGIN} s and finite, not {pause}")
    if not 0 < every < math.inf:
        raise ValueError(f"every must be positive and finite, not {every}")
    cutter, draft = Cutter(recognizer.piece_seconds, pause, SpeechDetector()), _Draft()
    new, wanted = 0.0, every  # seconds of speech since the last draft, and how many make the next
    least, most = (round(seconds * SAMPLE_RATE) for seconds in (TURN, recognizer.piece_seconds))
    for fresh, last in _turns(blocks, least, most):
        if pieces := list(cutter.cut(fresh, last)):
            draft = _Draft()
            for each in zip(pieces, decode(recognizer, [piece.samples for piece in pieces]), strict=True):
                yield Heard([segment for segment in recognizer.segments(*each) if segment.words])
        new = new + len(fresh) / SAMPLE_RATE if cutter.speaks else 0.0
        if drafter and new >= wanted:
            piece, began = Piece(cutter.start / SAMPLE_RATE, cutter.rest), time.monotonic()
            [found] = decode(drafter, [piece.samples])
            new, wanted = 0.0, max(every, rest * (time.monotonic() - began))
            if draft.is_news([word.text for part in drafter.segments(piece, found) for word in part.words]):
                yield Heard([], piece.start, draft.settled, draft.tentative)


def drafter_of(recognizer: Recognizer, strategy: str | None = None) -> Recognizer:
    """The same model with a faster search: one of `DRAFTS` (None: rescore, or greedy if CTC is not used). Raises
    ValueError for a strategy that the model does not support."""
    if strategy is None:
        strategy = "rescore" if recognizer.model.transformer.ctc and recognizer.options.ctc_weight else "greedy"
    options = {"strategy": strategy, "nbest": 1, "temperature": 0.0, "fallback": ()}
    if strategy == "ctc":
        options |= {"beam_size": 1, "lm_weight": 0.0, "ilm_weight": 0.0, "phrases": ()}  # the likeliest path
    drafter = recognizer.with_options(**options)
    drafter.word_times = False
    return drafter


class _Draft:
    """The words, as far as they are known, of a piece that is being spoken."""

    def __init__(self):
        self.agreed: list[str] = []
        self.others: list[str] = []  # the last draft's, after the agreed ones

    def is_news(self, words: list[str]) -> bool:
        """Adds a draft, and returns whether it says something new."""
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
    """The samples that have arrived, `least` to `most` at a time, and whether they are the last, which may be fewer."""
    waiting = np.zeros(0, np.float32)
    for block in blocks:
        waiting = np.concatenate([waiting, *sound_of(block)])
        while len(waiting) >= least:
            yield waiting[:most], False
            waiting = waiting[most:]
    yield waiting, True


def _next(inbox: queue.Queue[bytes | None]) -> bytes | None:
    """The next block, however long it takes. Wakes up every second: of a Ctrl-C that arrives just before it starts to
    wait, Python would hear only with the next block."""
    while True:
        try:
            return inbox.get(timeout=1.0)
        except queue.Empty:
            continue


def drained(inbox: queue.Queue[bytes | None]) -> Iterator[np.ndarray]:
    """Samples `(N,)`, float32, of raw 16-bit audio (little-endian, one channel) whose bytes another thread puts in the
    inbox: all that has arrived since the last block, as one block of hardly more than `MOST_BYTES`. None ends it."""
    raw, block = b"", b""
    while block is not None:
        waiting, size = [raw], 0  # the first half of a sample may have arrived
        block = _next(inbox)
        while block is not None:
            waiting.append(block)
            size += len(block)
            if size >= MOST_BYTES or inbox.empty():
                break
            block = inbox.get()  # is there
        raw = b"".join(waiting)
        yield np.frombuffer(raw, "<i2", len(raw) // 2).astype(np.float32) / 32768
        raw = raw[len(raw) // 2 * 2 :]
