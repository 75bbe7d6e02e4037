"""One recogniser for many threads: what several want decoded at the same time is decoded in one batch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from asr.decode.options import Hypothesis
from asr.decode.recognizer import Recognizer
from asr.decode.recordings import Recording, name_of
from asr.decode.segments import Piece
from asr.decode.transcript import Job, Transcript
from asr.heap import return_freed_blocks


class Abandoned(Exception):
    """Nobody waits for the transcript any more."""


@dataclass(eq=False)
class Call:
    """A piece of a recording on its way to the thread that decodes, and what it finds in it."""

    recognizer: Recognizer  # with the options of its request
    samples: np.ndarray
    is_wanted: Callable[[], bool]
    found: Future[list[Hypothesis]] = field(default_factory=Future)


class SharedRecognizer:
    """Each thread reads its recording and cuts it at its pauses; another decodes the pieces of all, first come, first
    served, those of requests with the same options in one batch of at most the recogniser's `batch_seconds`. No
    recording has more than that waiting, so that an hour does not hold up the short ones behind it."""

    def __init__(self, recognizer: Recognizer):
        self.recognizer = recognizer
        self._waiting: list[Call] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    def transcribe(
        self, recording: Recording, own: Recognizer | None = None, is_wanted: Callable[[], bool] = lambda: True
    ) -> Transcript:
        """The transcript of a recording, with an error where it could not be read to its end; `own` is the recogniser
        with the options of this request, by its `with_options`. Raises Abandoned soon after `is_wanted` says no."""
        own = own or self.recognizer
        most = own.fitting(own.batch_seconds, round(own.piece_seconds * own.rate))
        asked: deque[tuple[Job, Piece, Call]] = deque()
        for job, piece in own.read([(name_of(recording), recording)]):
            if piece is not None:
                asked.append((job, piece, self._ask(Call(own, piece.samples, is_wanted))))
            while asked and (piece is None or len(asked) > most):
                of, cut, call = asked.popleft()
                of.segments += own.segments(cut, call.found.result())
        return job.transcript()

    def _ask(self, call: Call) -> Call:
        with self._changed:
            self._waiting.append(call)
            self._changed.notify_all()
        return call

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                batch = self._next_batch()
            try:
                found = batch[0].recognizer.recognize([call.samples for call in batch]) if batch else []
            except Exception as error:
                for call in batch:
                    call.found.set_exception(error)
                continue
            for call, hypotheses in zip(batch, found, strict=True):
                call.found.set_result(hypotheses)
            if not self._waiting:
                return_freed_blocks()

    def _next_batch(self) -> list[Call]:
        """Takes the first that waits, and of those behind it what has the same options and fits, the longest first."""
        batch: list[Call] = []
        left: list[Call] = []
        longest = 0
        for call in self._waiting:
            longest_then = max(longest, len(call.samples))
            if not call.is_wanted():
                call.found.set_exception(Abandoned())
            elif not batch or (
                call.recognizer.options == batch[0].recognizer.options
                and len(batch) < call.recognizer.fitting(call.recognizer.batch_seconds, longest_then)
            ):
                batch.append(call)
                longest = longest_then
            else:
                left.append(call)
        self._waiting = left
        return sorted(batch, key=lambda call: -len(call.samples))
