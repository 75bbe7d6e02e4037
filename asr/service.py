"""OpenAI's interface to a recogniser, as the ASGI application that `asr.serve` runs."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, NamedTuple

import python_multipart  # noqa: F401 (Starlette needs it for forms, but would only miss it later)
from starlette.applications import Starlette
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from asr.decode.recognizer import Recognizer
from asr.decode.sharing import Abandoned, SharedRecognizer
from asr.decode.transcript import Transcript
from asr.formats import FORMATS, as_dict
from asr.realtime import TRY_AGAIN_LATER, Connection

MEDIA = {  # the content type of each `response_format`
    "json": "application/json",
    "verbose_json": "application/json",
    "text": "text/plain",
    "srt": "text/plain",
    "vtt": "text/vtt",
}
# clients send these fields to any server
WITHOUT_EFFECT = ("model", "language", "languages[]", "prompt", "temperature", "include[]", "chunking_strategy")
PHRASES = ("phrases", "phrases[]", "keywords[]")  # the last is OpenAI's
FIELDS = ("file", "response_format", "timestamp_granularities[]", *PHRASES, "phrase_weight", "stream", *WITHOUT_EFFECT)
OF_WHISPER = {"seek": 0, "tokens": [], "temperature": 0.0, "compression_ratio": 1.0, "no_speech_prob": 0.0}
MOST_PHRASES, MOST_LETTERS = 1000, 20_000  # per request, letters in total: each of them gets tables
LISTS = 4  # of phrases whose tables are cached


class Limits(NamedTuple):
    """The upper limits of a service."""

    at_once: int  # recordings read at the same time
    waiting: int  # further requests that wait for that
    mib: float  # size of a request
    seconds: float  # length of a recording
    streams: int  # realtime connections


class Asked(NamedTuple):
    """What a request asks for."""

    upload: UploadFile
    response_format: str
    all_words: bool  # in one list, in addition to those of each segment
    language: str  # as the client gave it
    options: dict[str, Any]  # of the search


def asked_for(form: FormData) -> Asked:
    """Parses the fields of a request. Raises ValueError."""
    given = {name: value for name, value in form.multi_items() if value != ""}
    if isinstance(given.get("file", ""), str):
        raise ValueError("file must be an audio file, in a multipart form")
    others = (name for name in given if name not in FIELDS)
    if unknown := next((name for name in others if not name.startswith("chunking_strategy[")), None):  # an object's
        raise ValueError(f"{unknown} is not known here; fields are {', '.join(FIELDS)}")
    if no_text := next((name for name, value in given.items() if name != "file" and not isinstance(value, str)), None):
        raise ValueError(f"{no_text} must be text, not a file")
    response_format = given.get("response_format", "json")
    if response_format not in MEDIA:
        raise ValueError(f"response_format is one of {', '.join(MEDIA)}, not {response_format}")
    granularities = [value for value in form.getlist("timestamp_granularities[]") if value != ""]
    if wrong := set(granularities) - {"word", "segment"}:
        raise ValueError(f"timestamp_granularities[] are word and segment, not {', '.join(wrong)}")
    if given.get("stream", "false").lower() != "false":
        raise ValueError("stream: transcripts are only sent whole")
    options: dict[str, Any] = {}
    lines = [line for name in PHRASES for text in form.getlist(name) for line in text.splitlines()]
    if phrases := tuple(line for line in lines if line.strip()):
        check_phrases(phrases)
        options["phrases"] = phrases
    if weight := given.get("phrase_weight"):
        if not phrases:
            raise ValueError(f"phrase_weight {weight}: there are no phrases")
        try:
            options["phrase_weight"] = float(weight)
        except ValueError:
            raise ValueError(f"phrase_weight must be a number, not {weight}") from None
    return Asked(given["file"], response_format, "word" in granularities, given.get("language", ""), options)


def check_phrases(phrases: tuple[str, ...]) -> None:
    """Raises ValueError for more phrases than a request may have."""
    if len(phrases) > MOST_PHRASES or sum(map(len, phrases)) > MOST_LETTERS:
        raise ValueError(f"phrases: more than {MOST_PHRASES}, or than {MOST_LETTERS} letters in all")


def written(transcript: Transcript, asked: Asked) -> str:
    """The body of the response."""
    if asked.response_format == "json":
        return json.dumps({"text": transcript.text}, ensure_ascii=False)
    if asked.response_format != "verbose_json":
        return FORMATS[asked.response_format](transcript)
    known = {"task": "transcribe", "language": asked.language, **as_dict(transcript)}
    for i, (described, segment) in enumerate(zip(known["segments"], transcript.segments, strict=True)):
        scores = [score for word in segment.words for score in word.token_scores]
        described |= {"id": i, "avg_logprob": sum(scores) / max(1, len(scores)), **OF_WHISPER}
    if asked.all_words:
        known["words"] = [word for segment in known["segments"] for word in segment["words"]]
    return json.dumps(known, ensure_ascii=False)


def refusal(status: int, message: str, headers: Mapping[str, str] | None = None, **more: str) -> Response:
    """An error response as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind}, **more}, status, headers)


class Service:
    """A recogniser, the threads that read for it, and the requests in progress; its methods answer the routes."""

    def __init__(self, recognizer: Recognizer, name: str, limits: Limits):
        self.shared, self.limits = SharedRecognizer(recognizer), limits
        self.readers, self.hearers = ThreadPoolExecutor(limits.at_once), ThreadPoolExecutor(limits.streams)
        self.streams = 0  # open realtime connections
        self.at_work: set[threading.Event] = set()  # one per request that is read or waits, set once it has ended
        self.with_options = lru_cache(LISTS)(recognizer.with_options)
        self.described = {"id": name, "object": "model", "created": 0, "owned_by": "asr"}

    async def transcriptions(self, request: Request) -> Response:
        size, most = request.headers.get("content-length"), self.limits.mib
        if size is None or "transfer-encoding" in request.headers:
            raise HTTPException(411, "the request must have a Content-Length, and be sent in one piece")
        if int(size) > most * 2**20:
            raise HTTPException(413, f"the request has {int(size) / 2**20:.1f} MiB, at most {most:g} are taken")
        self._check_room()
        async with request.form(max_files=1, max_fields=MOST_PHRASES + 100, max_part_size=2**18) as form:
            try:
                asked = asked_for(form)
                if asked.all_words and not self.shared.recognizer.word_times:
                    raise ValueError("timestamp_granularities[]: the model has no CTC, which gives the times of words")
            except ValueError as error:
                raise HTTPException(400, str(error)) from None
            transcript = await self._transcript(request, asked)
        if transcript.error:
            return refusal(400, transcript.error, text=transcript.text)
        return Response(written(transcript, asked), media_type=MEDIA[asked.response_format])

    def _check_room(self) -> None:
        if len(self.at_work) >= self.limits.at_once + self.limits.waiting:
            raise HTTPException(503, "too many requests at once", {"Retry-After": "10"})

    async def _transcript(self, request: Request, asked: Asked) -> Transcript:
        self._check_room()  # other requests may have come during this one's upload
        self.at_work.add(gone := threading.Event())
        try:
            work = asyncio.get_running_loop().run_in_executor(self.readers, self._read, asked, gone)
            while not (await asyncio.wait([work], timeout=1.0))[0]:
                if await request.is_disconnected():
                    gone.set()
            return work.result()
        finally:
            gone.set()  # if the server stops before that
            self.at_work.remove(gone)

    def _read(self, asked: Asked, gone: threading.Event) -> Transcript:
        """Reads and transcribes the upload, in a reader thread."""
        if gone.is_set():
            raise Abandoned
        try:
            own = self.with_options(**asked.options)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        sound = io.BytesIO(asked.upload.file.read())
        sound.name = asked.upload.filename
        return self.shared.transcribe(sound, own, gone, self.limits.seconds)

    async def realtime(self, socket: WebSocket) -> None:
        await socket.accept()
        if self.streams >= self.limits.streams:
            return await socket.close(TRY_AGAIN_LATER, "too many connections at once")
        self.streams += 1
        try:
            await Connection(socket, self.shared, self._with_phrases, self.described["id"]).run(self.hearers)
        finally:
            self.streams -= 1

    def _with_phrases(self, phrases: tuple[str, ...]) -> Recognizer:
        check_phrases(phrases)
        return self.with_options(phrases=phrases) if phrases else self.shared.recognizer

    async def models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self.described]})

    async def model(self, request: Request) -> Response:
        if request.path_params["name"] != self.described["id"]:
            raise HTTPException(404, f"the only model is {self.described['id']}")
        return JSONResponse(self.described)

    async def health(self, _: Request) -> Response:
        if await asyncio.to_thread(self.shared.works):
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "decoding fails"}, 503)

    async def refused(self, _: Request, error: HTTPException) -> Response:
        return refusal(error.status_code, error.detail, error.headers)

    async def abandoned(self, _: Request, error: Exception) -> Response:
        return refusal(499, "the client has gone")

    async def failed(self, _: Request, error: Exception) -> Response:
        return refusal(500, "the server failed, and has logged why")


def application(recognizer: Recognizer, name: str, limits: Limits) -> Starlette:
    """The application, for any ASGI server or for mounting in another one; clients see the model as `name`."""
    service = Service(recognizer, name, limits)
    return Starlette(
        routes=[
            Route("/v1/audio/transcriptions", service.transcriptions, methods=["POST"]),
            WebSocketRoute("/v1/realtime", service.realtime),
            Route("/v1/models", service.models),
            Route("/v1/models/{name:path}", service.model),
            Route("/health", service.health),
        ],
        exception_handlers={
            HTTPException: service.refused,
            Abandoned: service.abandoned,
            ClientDisconnect: service.abandoned,
            Exception: service.failed,
        },
    )
