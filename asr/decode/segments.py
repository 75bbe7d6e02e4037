"""Cutting long recordings at pauses (silero-vad), in bounded memory.

A recording of up to `longest` seconds is one piece. A longer one streams through a window: long pauses are dropped, and
a stretch of speech that is too long is cut in its longest pause.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from asr.audio.features import QUIET, SILENCE, amplitude
from asr.audio.reading import SAMPLE_RATE

LONGEST = 20.0  # seconds of a piece
SHORTEST, SHARE = 4.0, 5  # a piece may end in a pause after so many seconds, or after 1 / SHARE of the longest piece
FRAME = 512  # samples that silero-vad classifies at once
ROWS = 16  # stretches of audio classified in parallel
ROW_FRAMES = 30 * SAMPLE_RATE // FRAME
WARM_UP = 32  # frames before each row that only set the detector's state
SPEECH, PAUSE = 0.5, 0.35  # probabilities from which a frame is speech, and below which it is a pause
CERTAIN = 0.9  # probability that some frame of any speech reaches, but hardly any frame of noise or music
STRETCH = SAMPLE_RATE // 2  # samples that are amplified together if they are quiet
BEFORE = 2 * STRETCH  # samples that also count for the loudness of the next ones
MARGIN = 0.2  # seconds kept around speech
LONG_PAUSE = 1.0  # seconds of silence that end a piece of a complete recording


class Piece(NamedTuple):
    """A stretch of a recording to decode on its own."""

    start: float  # seconds
    samples: np.ndarray  # (N,)


def cut_at_pauses(blocks: Iterator[np.ndarray], longest: float = LONGEST) -> Iterator[Piece]:
    """Cuts a recording, in blocks `(N,)` of 16 kHz samples, into pieces of at most `longest` seconds, in order."""
    tape, size = _Tape(blocks), max(ROWS * ROW_FRAMES * FRAME, int(longest * SAMPLE_RATE) + FRAME)
    fresh, wanted = tape.take(size), size
    if len(fresh) <= longest * SAMPLE_RATE:
        if len(fresh):
            yield Piece(0.0, fresh)
        return
    cutter = Cutter(longest)
    while True:
        yield from cutter.cut(fresh, last=len(fresh) < wanted)
        if len(fresh) < wanted:
            return
        wanted = size - len(cutter.rest)
        fresh = tape.take(wanted)


class Cutter:
    """Cuts a recording at its pauses while it comes in: a piece is available as soon as its end is certain."""

    def __init__(
        self,
        longest: float = LONGEST,
        pause: float = LONG_PAUSE,
        judge: Callable[[np.ndarray], np.ndarray] | None = None,
    ):
        """A piece has at most `longest` seconds, and ends in a pause of `pause` seconds (at least `MARGIN`); `judge`
        gives the `speech_probabilities` of the samples that come next."""
        self.longest, self.pause = int(longest * SAMPLE_RATE / FRAME), _frames(pause)
        self.judge = judge or speech_probabilities
        self.start = 0  # samples before the rest
        self.rest = np.zeros(0, np.float32)  # samples that are in no piece yet
        self.probabilities = np.zeros(0, np.float32)  # of speech, for each whole frame of the rest

    @property
    def speaks(self) -> bool:
        """Whether there is speech in the rest."""
        return bool((self.probabilities >= SPEECH).any())

    def cut(self, fresh: np.ndarray, last: bool = False) -> Iterator[Piece]:
        """The pieces that end in the rest extended by the samples `fresh (N,)`; `last`: no samples come after them."""
        self.rest = np.concatenate([self.rest, fresh])
        frames = -(-len(self.rest) // FRAME) if last else len(self.rest) // FRAME
        new = self.rest[len(self.probabilities) * FRAME : frames * FRAME]
        if len(new):
            self.probabilities = np.concatenate([self.probabilities, self.judge(new)])
        done = 0
        for begin, end in _stretches(self.probabilities, last, self.longest, self.pause):
            done = end
            if begin is not None:
                first, stop = begin * FRAME, min(end * FRAME, len(self.rest))
                # a copy: a piece waits for others, and a view would keep the whole rest in memory
                yield Piece((self.start + first) / SAMPLE_RATE, self.rest[first:stop].copy())
        self.start += min(done * FRAME, len(self.rest))
        self.rest, self.probabilities = self.rest[done * FRAME :], self.probabilities[done:]


def speech_probabilities(samples: np.ndarray) -> np.ndarray:
    """Probability of speech in each frame of 32 ms: `(N,)` -> `(ceil(N / 512),)`."""
    frames = -(-len(samples) // FRAME)
    if not frames:
        return np.zeros(0, np.float32)
    per_row = -(-frames // ROWS)
    padding = WARM_UP * FRAME, ROWS * per_row * FRAME - len(samples)
    padded = nn.functional.pad(_raised(samples), padding)
    rows = padded.unfold(0, (WARM_UP + per_row) * FRAME, per_row * FRAME)
    chunks = rows.unflatten(1, (-1, FRAME)).transpose(0, 1)
    detector = _detector()
    detector.reset_states()
    with torch.inference_mode():
        judged = torch.cat([detector(chunk, SAMPLE_RATE) for chunk in chunks], dim=1)
    return judged[:, WARM_UP:].flatten()[:frames].numpy()


def has_speech(samples: np.ndarray) -> bool:
    """Whether some frame of `(N,)` is certainly speech: frames are classified in turn, up to the first that is."""
    detector = _detector()
    detector.reset_states()
    return any(probability >= CERTAIN for probability in _judged(detector, _raised(samples)))


class SpeechDetector:
    """`speech_probabilities` of a recording that is still coming in, which is passed in stretch by stretch; all but the
    last consist of whole frames."""

    def __init__(self):
        self._detector = _new_detector()
        self._heard = np.zeros(0, np.float32)

    def __call__(self, samples: np.ndarray) -> np.ndarray:
        heard = np.concatenate([self._heard, samples])
        raised = _raised(heard)[len(self._heard) :]
        self._heard = heard[-BEFORE:]
        return np.array(list(_judged(self._detector, raised)), np.float32)


def _judged(detector, sound: torch.Tensor) -> Iterator[float]:
    """The speech probabilities of the frames of `sound (N,)`, which follow those that the detector remembers."""
    with torch.inference_mode():
        for frame in nn.functional.pad(sound, (0, -len(sound) % FRAME)).view(-1, 1, FRAME):
            yield float(detector(frame, SAMPLE_RATE))


def _raised(samples: np.ndarray) -> torch.Tensor:
    """Amplifies samples `(N,)` for a detector that misses quiet speech: each stretch as far as the loudest of it and
    its neighbours allows, whoever speaks before or after; samples of a larger scale are reduced to 1, where clicks are
    clipped."""
    sound = torch.from_numpy(np.pad(samples, (0, -len(samples) % STRETCH)))
    level = amplitude(sound.view(-1, STRETCH)).view(1, 1, -1)
    gains = QUIET / level.clamp(SILENCE, QUIET) / level.clamp(min=1.0)
    gains = -nn.functional.max_pool1d(-gains, kernel_size=3, stride=1, padding=1)
    gains = nn.functional.interpolate(gains, scale_factor=STRETCH, mode="linear").flatten()
    return sound.mul_(gains).clamp_(-1.0, 1.0)[: len(samples)]


def _stretches(probabilities: np.ndarray, last: bool, longest: int, pause: int) -> Iterator[tuple[int | None, int]]:
    """(begin, end) in frames of each piece in a window, at most `longest`; begin None: there is no speech up to `end`.

    If more is to come (not `last`), stops before the first piece whose end depends on it."""
    margin, position, total = _frames(MARGIN), 0, len(probabilities)
    while position < total:
        ahead = probabilities[position : position + longest]
        is_rest = last and position + len(ahead) == total
        speech = np.flatnonzero(ahead >= SPEECH)
        if not len(speech):
            begin, end = None, len(ahead) if is_rest else len(ahead) - margin  # what follows may start with speech
        elif speech[0] > margin:
            begin, end = None, int(speech[0]) - margin
        else:
            begin, end = position, _end(ahead, int(speech[0]), longest, pause, is_rest)
        if end <= 0:
            return
        position += end
        yield begin, position


def _end(ahead: np.ndarray, first: int, longest: int, pause: int, is_rest: bool) -> int:
    """The end of the piece that starts with speech in frame `first` of the probabilities `ahead`; 0: not known yet.

    It lies at the first pause of `pause` frames; else, unless this is the rest of the recording, in the middle of the
    longest pause after `SHORTEST`, or at the frame least like speech in the second half."""
    begins, ends = _runs(ahead[first:] < PAUSE)
    begins, ends = begins + first, ends + first
    long = np.flatnonzero(ends - begins >= pause)
    if len(long):
        return int(begins[long[0]]) + _frames(MARGIN)
    if is_rest:
        return len(ahead)
    if len(ahead) < longest:
        return 0
    shortest = min(_frames(SHORTEST), len(ahead) // SHARE)
    late = ends > shortest
    if not late.any():
        half = len(ahead) // 2
        return half + int(np.argmin(ahead[half:])) + 1
    begins, ends = np.maximum(begins[late], shortest), ends[late]
    longest_pause = int(np.argmax(ends - begins))
    return int(begins[longest_pause] + ends[longest_pause] + 1) // 2


def _runs(quiet: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and one-past-last frame of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], quiet, [False]]).astype(np.int8)))
    return edges[::2], edges[1::2]


def _frames(seconds: float) -> int:
    return round(seconds * SAMPLE_RATE / FRAME)


class _Tape:
    """Reads blocks of any size, and hands out as many samples at a time as are requested."""

    def __init__(self, blocks: Iterator[np.ndarray]):
        self.blocks = iter(blocks)
        self.rest = np.zeros(0, np.float32)

    def take(self, most: int) -> np.ndarray:
        parts = [np.zeros(0, np.float32)]
        while most:
            if not len(self.rest):
                block = next(self.blocks, None)
                if block is None:
                    break
                self.rest = block
            parts.append(self.rest[:most])
            self.rest = self.rest[most:]
            most -= len(parts[-1])
        return np.concatenate(parts)


_own = threading.local()  # the detector is stateful: each thread has its own
_loading = threading.Lock()


def _detector():
    if not hasattr(_own, "detector"):
        _own.detector = _new_detector()
    return _own.detector


def _new_detector():
    with _loading, _threads_kept(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.load` is deprecated")  # where warnings are errors
        from silero_vad import load_silero_vad

        return load_silero_vad()


@contextlib.contextmanager
def _threads_kept() -> Iterator[None]:
    """Stops the import of silero_vad from setting torch to one thread for the whole process. Setting it back afterwards
    would be too late for code that computes for the first time in between, and keeps the number it finds."""
    set_num_threads, torch.set_num_threads = torch.set_num_threads, lambda count: None
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
