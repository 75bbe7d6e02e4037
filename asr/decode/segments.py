"""Long recordings: cutting at pauses (silero-vad), in bounded memory.

A sound of up to `longest` seconds is one piece. What is longer streams through a window: long pauses are dropped, and a
stretch of speech that is too long is cut in its longest pause.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from asr.audio.features import quiet_gain
from asr.audio.reading import SAMPLE_RATE

LONGEST = 20.0  # seconds of a piece
SHORTEST, SHARE = 4.0, 5  # a piece may end in a pause after so many seconds, or after 1 / SHARE of the longest's
FRAME = 512  # samples that silero-vad judges at once
ROWS = 16  # stretches of sound judged side by side
ROW_FRAMES = 30 * SAMPLE_RATE // FRAME
WARM_UP = 32  # frames before a row that only set the detector's state
SPEECH, PAUSE = 0.5, 0.35  # probabilities above and below which a frame is speech, or is none
CERTAIN = 0.9  # probability that some frame of any speech has, and of noise or music hardly one
STRETCH = SAMPLE_RATE // 2  # samples of which quiet ones are raised together
MARGIN = 0.2  # seconds kept around speech
LONG_PAUSE = 1.0  # seconds of silence that end a piece


class Piece(NamedTuple):
    """A stretch of a recording to decode on its own."""

    start: float  # seconds
    samples: np.ndarray  # (N,)


def cut_at_pauses(blocks: Iterator[np.ndarray], longest: float = LONGEST) -> Iterator[Piece]:
    """Pieces of at most `longest` seconds of a recording that comes in blocks `(N,)` of 16 kHz samples, in order."""
    tape, size = _Tape(blocks), max(ROWS * ROW_FRAMES * FRAME, int(longest * SAMPLE_RATE) + FRAME)
    window = tape.take(size)
    if len(window) <= longest * SAMPLE_RATE:
        if len(window):
            yield Piece(0.0, window)
        return
    done, start = 0, 0  # `start`: where the window begins in the recording
    probabilities = speech_probabilities(window)
    while len(window):
        last = len(window) < size
        for begin, end in _stretches(probabilities, last, int(longest * SAMPLE_RATE / FRAME)):
            done = end
            if begin is not None:
                first, stop = begin * FRAME, min(end * FRAME, len(window))
                # a copy: it waits for others, and a view would keep the whole window
                yield Piece((start + first) / SAMPLE_RATE, window[first:stop].copy())
        if last:
            return
        rest, start = window[done * FRAME :], start + done * FRAME
        fresh = tape.take(size - len(rest))
        window = np.concatenate([rest, fresh])
        probabilities = np.concatenate([probabilities[done:], speech_probabilities(fresh)])


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
    """Whether some frame of `(N,)` certainly is speech: they are judged one by one, up to the first that is."""
    sound = _raised(np.pad(samples, (0, -len(samples) % FRAME)))[None]
    detector = _detector()
    detector.reset_states()
    with torch.inference_mode():
        return any(float(detector(frame, SAMPLE_RATE)) >= CERTAIN for frame in sound.split(FRAME, dim=1))


def _raised(samples: np.ndarray) -> torch.Tensor:
    """`(N,)` for a detector that misses quiet speech: as loud as the loudest of the stretches around it allows, whoever
    speaks before or after; clicks are cut off at 1."""
    sound = torch.from_numpy(np.pad(samples, (0, -len(samples) % STRETCH)))
    gains = quiet_gain(sound.view(-1, STRETCH)).view(1, 1, -1)
    gains = -nn.functional.max_pool1d(-gains, kernel_size=3, stride=1, padding=1)
    gains = nn.functional.interpolate(gains, scale_factor=STRETCH, mode="linear").flatten()
    return sound.mul_(gains).clamp_(-1.0, 1.0)[: len(samples)]


def _stretches(probabilities: np.ndarray, last: bool, longest: int) -> Iterator[tuple[int | None, int]]:
    """(begin, end) in frames of each piece within a window, `longest` at most; begin None: nothing there, on to `end`.

    Where more is to come (not `last`) it stops before the piece that may reach into it."""
    margin, position, total = _frames(MARGIN), 0, len(probabilities)
    while position < total:
        ahead = probabilities[position : position + longest]
        if not last and len(ahead) < longest:
            return
        speech = np.flatnonzero(ahead >= SPEECH)
        if not len(speech):
            # a margin stays behind: what follows may begin with speech
            end = total if last and position + len(ahead) >= total else position + max(1, len(ahead) - margin)
            yield None, end
            position = end
        elif speech[0] > 2 * margin:
            position += int(speech[0]) - margin
            yield None, position
        else:
            end = position + _end(ahead, int(speech[0]), is_rest=last and position + len(ahead) == total)
            yield position, end
            position = end


def _end(ahead: np.ndarray, first: int, is_rest: bool) -> int:
    """Where the piece ends that begins with speech in frame `first` of the probabilities `ahead`.

    At the first pause of `LONG_PAUSE`; else, unless this is the rest of the recording, in the middle of the longest
    pause after `SHORTEST`, or at the frame least like speech."""
    begins, ends = _runs(ahead[first:] < PAUSE)
    begins, ends = begins + first, ends + first
    long = np.flatnonzero(ends - begins >= _frames(LONG_PAUSE))
    if len(long):
        return int(begins[long[0]]) + _frames(MARGIN)
    if is_rest:
        return len(ahead)
    shortest = min(_frames(SHORTEST), len(ahead) // SHARE)
    late = ends > shortest
    if not late.any():
        half = len(ahead) // 2
        return half + int(np.argmin(ahead[half:])) + 1
    begins, ends = np.maximum(begins[late], shortest), ends[late]
    longest = int(np.argmax(ends - begins))
    return int(begins[longest] + ends[longest] + 1) // 2


def _runs(quiet: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and one-past-last frame of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], quiet, [False]]).astype(np.int8)))
    return edges[::2], edges[1::2]


def _frames(seconds: float) -> int:
    return round(seconds * SAMPLE_RATE / FRAME)


class _Tape:
    """Takes as many samples at a time as are asked for from blocks of any size."""

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


_own = threading.local()  # the detector remembers what it has heard: each thread has one
_loading = threading.Lock()


def _detector():
    if not hasattr(_own, "detector"):
        with _loading, _threads_kept():
            from silero_vad import load_silero_vad

            _own.detector = load_silero_vad()
    return _own.detector


@contextlib.contextmanager
def _threads_kept() -> Iterator[None]:
    """Importing silero_vad sets torch to one thread for the whole process. To set it back would be too late for whoever
    computes for the first time in between, and keeps what it finds."""
    set_num_threads, torch.set_num_threads = torch.set_num_threads, lambda count: None
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
