"""OpenAI's realtime interface to a recogniser: a WebSocket that takes audio in and sends words back.

Only sessions of type `transcription` are served; their events have OpenAI's names and fields.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import queue
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from starlette.websockets import WebSocket, WebSocketDisconnect

from asr.audio.reading import SAMPLE_RATE, resampled
from asr.decode.listening import PAUSE, drafter_of, drained, listen
from asr.decode.recognizer import Recognizer
from asr.decode.segments import MARGIN
from asr.decode.sharing import Abandoned, SharedRecognizer
from asr.decode.transcript import Segment
from asr.text.words import join_words

logger = logging.getLogger(__name__)

REST = 2.0  # pause for other clients after a draft, as a multiple of the time it took
NEVER = 86_400.0  # seconds of silence that never occur, so that a pause ends nothing
# most that a client may have waiting for the recogniser: bytes of audio, blocks, and marks (which may have phrases)
MOST_BYTES, MOST_BLOCKS, MOST_MARKS = 32 * 2**20, 50_000, 32
QUOTED = 200  # characters of a client's message quoted in an error
SLOWEST = 60.0  # seconds that a client may take to read an event
TRANSCRIPTION = "conversation.item.input_audio_transcription"
TOO_MUCH, INTERNAL_ERROR, TRY_AGAIN_LATER = 1008, 1011, 1013  # close codes of a WebSocket
# clients send these fields to any server
WITHOUT_EFFECT = {
    "session": ("include", "model"),
    "input": ("noise_reduction",),
    "transcription": ("model", "language", "languages", "prompt", "delay"),
    "turn_detection": ("threshold", "prefix_padding_ms", "idle_timeout_ms", "create_response", "interrupt_response"),
}


class _Behind(Exception):
    """The client is too far ahead of the recogniser."""


class _Cleared(Exception):
    """The audio that has come in is to be discarded."""


@dataclass(frozen=True)
class Settings:
    """The settings of a session."""

    rate: int = 24_000  # samples per second
    pause: float | None = PAUSE  # seconds of silence that end an item; None: the client commits
    keywords: tuple[str, ...] = ()  # phrases to boost

    def updated(self, session: Any) -> Settings:
        """The settings after a `session.update`. Raises ValueError."""
        given = _fields("session", session, "type", "audio")
        if given.get("type", "transcription") != "transcription":
            raise ValueError(f"session.type must be transcription, not {given['type']}")
        audio = _fields("audio", given.get("audio", {}), "input")
        given = _fields("input", audio.get("input", {}), "format", "transcription", "turn_detection")
        settings = self
        if "format" in given:
            form = _fields("format", given["format"], "type", "rate")
            rate = form.get("rate", self.rate)
            if form.get("type") != "audio/pcm" or not isinstance(rate, int) or not 8_000 <= rate <= 48_000:
                raise ValueError("format must be audio/pcm with a rate between 8000 and 48000")
            settings = replace(settings, rate=rate)
        if "turn_detection" in given:
            settings = replace(settings, pause=_pause(given["turn_detection"], self.pause or PAUSE))
        if "keywords" in _fields("transcription", given.get("transcription") or {}, "keywords"):
            keywords = given["transcription"]["keywords"] or ()
            if not isinstance(keywords, list | tuple) or not all(isinstance(word, str) for word in keywords):
                raise ValueError("keywords must be a list of texts")
            "".join(keywords).encode()  # raises UnicodeEncodeError (a ValueError) for lone surrogates
            settings = replace(settings, keywords=tuple(word for word in keywords if word.strip()))
        return settings

    def described(self, model: str) -> dict[str, Any]:
        turns = None if self.pause is None else {"type": "server_vad", "silence_duration_ms": round(1000 * self.pause)}
        heard = {"format": {"type": "audio/pcm", "rate": self.rate}, "turn_detection": turns, "noise_reduction": None}
        audio = {"input": heard | {"transcription": {"model": model, "keywords": list(self.keywords)}}}
        return {"type": "transcription", "object": "realtime.transcription_session", "audio": audio}


def _pause(turn_detection: Any, before: float) -> float | None:
    if turn_detection is None:
        return None
    given = _fields("turn_detection", turn_detection, "type", "silence_duration_ms")
    milliseconds = given.get("silence_duration_ms", 1000 * before)
    if given.get("type", "server_vad") != "server_vad":
        raise ValueError(f"turn_detection is null or of type server_vad, not {given['type']}")
    if not isinstance(milliseconds, int | float) or not 1000 * MARGIN <= milliseconds <= 60_000:
        raise ValueError(f"silence_duration_ms must lie between {1000 * MARGIN:g} and 60000, not {milliseconds}")
    return milliseconds / 1000


def _fields(name: str, given: Any, *known: str) -> dict[str, Any]:
    """`given`, checked: raises ValueError if it is not an object or has an unknown field."""
    if not isinstance(given, dict):
        raise ValueError(f"{name} must be an object")
    unknown = [field for field in given if field not in (*known, *WITHOUT_EFFECT.get(name, ()))]
    if unknown:
        raise ValueError(f"{name} has no {unknown[0]}")
    return given


@dataclass(frozen=True)
class _Mark:
    """The end of a stretch of audio, and how the next one is decoded."""

    kind: str  # commit, clear or update
    settings: Settings
    recognizer: Recognizer


class Connection:
    """A client's connection: its events are handled in the event loop, and its audio is decoded in a thread."""

    def __init__(
        self,
        socket: WebSocket,
        shared: SharedRecognizer,
        with_phrases: Callable[[tuple[str, ...]], Recognizer],
        name: str,
    ):
        """`with_phrases` returns the recogniser with other phrases, or raises ValueError; `name` is the model's."""
        self.socket, self.shared, self.with_phrases, self.name = socket, shared, with_phrases, name
        self.id = f"sess_{uuid.uuid4().hex}"
        self.inbox: queue.Queue[bytes | None] = queue.Queue()
        self.marks: queue.SimpleQueue[_Mark] = queue.SimpleQueue()  # one for each None in the inbox
        self.put = self.taken = 0  # bytes put into the inbox, and taken out of it
        self.gone = threading.Event()
        # the last mark received, and the last one that decoding has reached
        self.asked = self.reached = _Mark("update", Settings(), shared.recognizer)
        self.is_empty = True  # whether no audio has come since the last mark
        self.half = b""  # of a sample whose second byte is still to come, wherever the client commits
        self.seconds = 0.0  # of audio decoded so far
        self.item: str | None = None  # the one being spoken
        self.start = 0.0  # where it starts, or the last one ended, in seconds
        self.told = ""  # its text sent so far
        self.previous: str | None = None  # the item completed last, now and when the last mark was reached
        self.before_mark: str | None = None

    async def run(self, threads: Executor) -> None:
        """Runs until the client leaves, is too slow or too fast, or decoding fails."""
        self.loop = asyncio.get_running_loop()
        events = asyncio.create_task(self._take_events())
        work = self.loop.run_in_executor(threads, self._hear)
        try:
            await asyncio.wait([events, work], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.gone.set()
            self.inbox.put(None)
            events.cancel()
            ends = await asyncio.gather(events, work, return_exceptions=True)
        for error in ends:
            if isinstance(error, Exception) and not isinstance(error, WebSocketDisconnect | Abandoned):
                await self._close(error)

    async def _close(self, error: Exception) -> None:
        code, kind, said = INTERNAL_ERROR, "server_error", "the server failed, and has logged why"
        if isinstance(error, _Behind):
            code, kind, said = TOO_MUCH, "invalid_request_error", str(error)
        elif isinstance(error, asyncio.TimeoutError | TimeoutError):
            said = f"an event could not be sent within {SLOWEST:g} s"
        else:
            logger.error("a realtime session failed", exc_info=error)
        with contextlib.suppress(Exception):
            await self._send("error", error={"type": kind, "message": said})
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self.socket.close(code), SLOWEST)

    async def _take_events(self) -> None:
        await self._send("session.created", session=self._session(self.asked.settings))
        while True:
            await self._take(await self.socket.receive())

    async def _take(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
        blocks, marks = self.inbox.qsize(), self.marks.qsize()
        if self.put - self.taken > MOST_BYTES or blocks > MOST_BLOCKS or marks > MOST_MARKS:
            raise _Behind("the client is too far ahead of processing")
        event: Any = None
        try:
            event = json.loads(message.get("text") or "")
            kind = event["type"]
            if kind == "input_audio_buffer.append":
                self._put(base64.b64decode(event["audio"], validate=True))
            elif kind == "input_audio_buffer.commit":
                if self.is_empty:
                    raise ValueError("input_audio_buffer.commit: there is no audio in the buffer")
                self._end_stretch("commit", self.asked.settings, self.asked.recognizer)
            elif kind == "input_audio_buffer.clear":
                self.half = b""
                self._end_stretch("clear", self.asked.settings, self.asked.recognizer)
            elif kind == "session.update":
                settings = self.asked.settings.updated(event["session"])
                recognizer = await asyncio.to_thread(self.with_phrases, settings.keywords)
                self._end_stretch("update", settings, recognizer)
            else:
                raise ValueError(f"{str(kind)[:QUOTED]}: not an event that is known here")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            said = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)[: 2 * QUOTED]
            answered = event.get("event_id") if isinstance(event, dict) else None
            answered = answered[:QUOTED] if isinstance(answered, str) else None
            await self._send("error", error={"type": "invalid_request_error", "message": said, "event_id": answered})

    def _put(self, block: bytes) -> None:
        block = self.half + block
        whole = len(block) // 2 * 2
        block, self.half = block[:whole], block[whole:]
        if block:
            self.inbox.put(block)
            self.put += len(block)
            self.is_empty = False

    def _end_stretch(self, kind: str, settings: Settings, recognizer: Recognizer) -> None:
        self.asked = _Mark(kind, settings, recognizer)
        self.marks.put(self.asked)
        self.inbox.put(None)
        self.is_empty = True

    def _session(self, settings: Settings) -> dict[str, Any]:
        return {"id": self.id, **settings.described(self.name)}

    async def _send(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "event_id": f"event_{uuid.uuid4().hex}", **fields}
        text = json.dumps(event)  # in ASCII: text quoted from the client may hold lone surrogates
        await asyncio.wait_for(self.socket.send_text(text), SLOWEST)

    # the methods below run in the decoding thread

    def _hear(self) -> None:
        while True:
            try:
                self._hear_stretch(self.reached)
            except _Cleared:
                self.item = None
                self._tell("input_audio_buffer.cleared")
            if self.reached.kind == "update":
                self._tell("session.updated", session=self._session(self.reached.settings))

    def _hear_stretch(self, mark: _Mark) -> None:
        """Decodes the audio up to the next mark with the settings of the last one, and sends the results."""
        begin, own, pause = self.seconds, mark.recognizer, mark.settings.pause
        self.start = begin
        drafter, silence = (drafter_of(own), pause) if pause else (None, NEVER)
        decode, sound = partial(self.shared.recognize, gone=self.gone), self._sound(mark.settings.rate)
        segments: list[Segment] = []
        for heard in listen(own, sound, drafter, pause=silence, decode=decode, rest=REST):
            segments += heard.segments
            if pause and heard.start is not None:
                self._add(begin + heard.start, heard.settled)
            elif pause and (segments or self.item):
                self._complete(begin, segments)
                segments = []
        # without turn detection an update ends an item, too; a commit is answered even for silence: the client waits
        if segments or (self.reached.kind == "commit" and self.previous == self.before_mark):
            self._complete(begin, segments)

    def _sound(self, rate: int) -> Iterator[np.ndarray]:
        """The client's audio up to its next mark."""
        for samples in resampled(self._taken(), rate):
            self.seconds += len(samples) / SAMPLE_RATE
            yield samples
        self.reached, self.before_mark = self.marks.get(), self.previous
        if self.reached.kind == "clear":
            raise _Cleared

    def _taken(self) -> Iterator[np.ndarray]:
        for samples in drained(self.inbox):
            if self.gone.is_set():
                raise Abandoned
            self.taken += 2 * len(samples)  # of two bytes each
            yield samples

    def _add(self, start: float, text: str) -> None:
        """Sends what is settled of the current item; if there is none, of a new one that starts at `start` seconds."""
        if self.item is None:
            self.item, self.start, self.told = f"item_{uuid.uuid4().hex}", start, ""
            self._tell("input_audio_buffer.speech_started", item_id=self.item, audio_start_ms=round(1000 * start))
        if len(text) > len(self.told):
            delta, self.told = text[len(self.told) :], text
            self._tell(f"{TRANSCRIPTION}.delta", item_id=self.item, content_index=0, delta=delta)

    def _complete(self, begin: float, segments: list[Segment]) -> None:
        """Completes the item with its final segments, whose times count from `begin` seconds."""
        start, end = self.start, self.seconds
        if segments:
            start, end = begin + segments[0].start, begin + segments[-1].end
        self._add(start, "")
        text = join_words(segment.text for segment in segments)
        usage = {"type": "duration", "seconds": round(end - self.start, 3)}
        item, self.item, self.start = self.item, None, end
        self._tell("input_audio_buffer.speech_stopped", item_id=item, audio_end_ms=round(1000 * end))
        self._tell("input_audio_buffer.committed", item_id=item, previous_item_id=self.previous)
        self._tell(f"{TRANSCRIPTION}.completed", item_id=item, content_index=0, transcript=text, usage=usage)
        self.previous = item

    def _tell(self, kind: str, **fields: Any) -> None:
        if self.gone.is_set():
            raise Abandoned
        asyncio.run_coroutine_threadsafe(self._send(kind, **fields), self.loop).result(2 * SLOWEST)
