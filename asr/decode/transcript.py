"""The results of a recogniser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from asr.text.words import join_words


@dataclass(frozen=True)
class Word:
    """A word and how sure the recogniser is of it, from 0 to 1."""

    text: str
    confidence: float
    start: float | None = None  # seconds, if times were requested and CTC gives them
    end: float | None = None
    token_scores: tuple[float, ...] = field(repr=False, default=())  # its tokens' (see Hypothesis)


@dataclass(frozen=True)
class Segment:
    """A piece of a recording and what was heard in it."""

    start: float  # seconds
    end: float  # seconds
    text: str
    score: float  # of the best hypothesis, as the search weighs it: no probability if a bonus or a bigram takes part
    nbest: list[tuple[str, float]] = field(default_factory=list)  # texts and scores, best first
    words: list[Word] = field(default_factory=list)  # of the best hypothesis

    @property
    def confidence(self) -> float | None:
        """The mean confidence of its words, an estimate of the share of them that is right. None without words."""
        return _mean_confidence(self.words)


@dataclass(frozen=True)
class Transcript:
    """What was heard in a recording. If it could not be read, or not to its end, `error` says why, and the text is what
    was heard up to there."""

    name: str
    text: str = ""
    duration: float = 0.0  # seconds
    segments: list[Segment] = field(default_factory=list)
    error: str | None = None

    @property
    def confidence(self) -> float | None:
        """The mean confidence of all words, as for a segment."""
        return _mean_confidence([word for segment in self.segments for word in segment.words])


def _mean_confidence(words: list[Word]) -> float | None:
    return sum(word.confidence for word in words) / len(words) if words else None


@dataclass(eq=False)
class Job:
    """A recording on its way through the recogniser."""

    name: str
    duration: float = 0.0
    segments: list[Segment] = field(default_factory=list)
    error: str | None = None
    is_read: bool = False
    check: Callable[[float], None] = lambda seconds: None  # called with the seconds read so far; may raise to stop

    def transcript(self) -> Transcript:
        segments = sorted(self.segments, key=lambda segment: segment.start)
        text = join_words(segment.text for segment in segments)
        return Transcript(self.name, text, self.duration, segments, self.error)
