"""One recogniser for many threads: requests that arrive at the same time are decoded in one batch."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from asr.audio.reading import AudioError
from asr.decode.options import DecodeOptions, Hypothesis
from asr.decode.recognizer import Recognizer
from asr.decode.recordings import Recording, name_of, random_inputs
from asr.decode.segments import Piece
from asr.decode.transcript import Job, Transcript
from asr.heap import return_freed_blocks

logger = logging.getLogger(__name__)


class Abandoned(Exception):
    """Nobody is waiting for the transcript any more."""


@dataclass(eq=False)
class Call:
    """A piece of a recording on its way to the decoding thread, and the hypotheses found in it."""

    recognizer: Recognizer  # with the options of the request
    samples: np.ndarray
    gone: threading.Event  # set once nobody waits for the piece
    found: Future[list[Hypothesis]] = field(default_factory=Future)

    @property
    def asks_for(self) -> tuple[DecodeOptions, bool]:
        return self.recognizer.options, self.recognizer.word_times


class SharedRecognizer:
    """Each thread reads its recording and cuts it at its pauses; another thread decodes the pieces of all, first come,
    first served, batching those with the same options up to the recogniser's `batch_seconds`. No recording has more
    than that waiting, so that an hour of audio does not hold up the short recordings behind it."""

    def __init__(self, recognizer: Recognizer):
        self.recognizer = recognizer
        self._fails = False  # whether the last decoding failed
        self._waiting: list[Call] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._work, daemon=True).start()

    def transcribe(
        self,
        recording: Recording,
        own: Recognizer | None = None,
        gone: threading.Event | None = None,
        max_seconds: float = math.inf,
    ) -> Transcript:
        """The transcript of a recording, with an error if it could not be read to its end or is longer than
        `max_seconds`; `own` is the recogniser with the options of this request, from its `with_options`. Raises
        Abandoned soon after `gone` is set, and any exception of the decoding."""
        own, gone = own or self.recognizer, gone or threading.Event()

        def check(seconds: float) -> None:
            if gone.is_set():
                raise Abandoned
            if seconds > max_seconds:
                raise AudioError(f"{job.name}: longer than {max_seconds:g} s")

        job = Job(name_of(recording), check=check)
        most = own.fitting(own.batch_seconds, round(own.piece_seconds * own.rate))
        pieces = (piece for _, piece in own.read([(job, recording)]) if piece is not None)
        asked: list[tuple[Piece, Call]] = []
        while True:
            lot = list(islice(pieces, most))  # as many as fit: requested one by one they would be batches of one
            for piece, call in asked:
                job.segments += own.segments(piece, call.found.result())
            if not lot:
                return job.transcript()
            asked = [(piece, Call(own, piece.samples, gone)) for piece in lot]
            self._ask([call for _, call in asked])

    def recognize(
        self, own: Recognizer, inputs: list[np.ndarray], gone: threading.Event | None = None
    ) -> list[list[Hypothesis]]:
        """`Recognizer.recognize` of `own`, which has the options of this request, in the shared batches. Raises
        Abandoned if inputs have not been decoded when `gone` is set, and any exception of the decoding."""
        calls = [Call(own, samples, gone or threading.Event()) for samples in inputs]
        self._ask(calls)
        return [call.found.result() for call in calls]

    def works(self) -> bool:
        """Whether decoding works; if the last one failed, a random second is tried first."""
        if self._fails:
            with contextlib.suppress(Exception):
                self.recognize(self.recognizer, random_inputs(self.recognizer.model, [round(self.recognizer.rate)]))
        return not self._fails

    def _ask(self, calls: list[Call]) -> None:
        with self._changed:
            self._waiting += calls
            self._changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                batch = self._next_batch()
            if batch:
                self._decode(batch)
            if not self._waiting:
                return_freed_blocks()

    def _next_batch(self) -> list[Call]:
        """Takes the first waiting call, and those behind it that have the same options and fit, the longest first."""
        batch: list[Call] = []
        left: list[Call] = []
        longest = 0
        for call in self._waiting:
            with_it = max(longest, len(call.samples))
            if call.gone.is_set():
                call.found.set_exception(Abandoned())
            elif not batch or (
                call.asks_for == batch[0].asks_for
                and len(batch) < call.recognizer.fitting(call.recognizer.batch_seconds, with_it)
            ):
                batch.append(call)
                longest = with_it
            else:
                left.append(call)
        self._waiting = left
        return sorted(batch, key=lambda call: -len(call.samples))

    def _decode(self, batch: list[Call]) -> None:
        """Decodes a batch; if it fails, each piece by itself: one of them may be the cause, or their number."""
        try:
            found = batch[0].recognizer.recognize([call.samples for call in batch])
            for call, hypotheses in list(zip(batch, found, strict=True)):  # a list: raises before any result is set
                call.found.set_result(hypotheses)
            self._fails = False
        except BaseException as error:  # whatever it is, the thread must go on
            if len(batch) == 1:
                self._fails = True
                failure = error if isinstance(error, Exception) else RuntimeError(f"decoding ended by {error!r}")
                batch[0].found.set_exception(failure)
                return
            logger.exception("a batch of %d pieces failed; each is now decoded alone", len(batch))
            for call in batch:
                self._decode([call])
