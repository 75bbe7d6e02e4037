"""A server of transcripts with OpenAI's interface: `python -m asr.serve`, then `POST /v1/audio/transcriptions`.

What is asked for at the same time is decoded together. `docs/serving.md` has examples and figures. Exit code 2 for a
wrong option or model, or an address that is taken.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from asr.commands import add_decoding_options, guarded, load_recognizer
from asr.formats import FORMATS, as_dict

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.datastructures import FormData, UploadFile

    from asr.decode import Transcript
    from asr.decode.sharing import SharedRecognizer

MEDIA = {  # of what may be asked for
    "json": "application/json",
    "verbose_json": "application/json",
    "text": "text/plain",
    "srt": "text/plain",
    "vtt": "text/vtt",
}
WITHOUT_EFFECT = ("model", "language", "temperature")  # clients send them, whatever it is that serves them
FIELDS = ("file", "response_format", "timestamp_granularities[]", "phrases", "phrase_weight", *WITHOUT_EFFECT)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asr-serve", description="Serves transcripts over HTTP, by OpenAI's POST /v1/audio/transcriptions."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: 127.0.0.1; 0.0.0.0: all)")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 takes one that is free")
    parser.add_argument("--at-once", type=int, default=16, help="recordings read at once, others wait (default: 16)")
    parser.add_argument("--max-mib", type=float, default=100.0, help="a larger request is refused (default: 100)")
    add_decoding_options(parser, batch_seconds=120.0)
    return parser


@guarded("asr.serve")
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    if args.at_once < 1 or not args.max_mib > 0:
        raise ValueError("--at-once and --max-mib must be positive")
    try:
        import python_multipart  # noqa: F401 (starlette reads forms with it)
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise ValueError(f"{error.name} is missing: pip install '.[serve]'") from None
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    with socket.create_server((args.host, args.port), family=family) as listening:
        recognizer = load_recognizer(args)
        if recognizer.takes != "sound":
            raise ValueError(f"--model: sound is served, and this model takes {recognizer.takes}")
        recognizer.word_times = recognizer.model.transformer.ctc is not None
        from asr.decode.sharing import SharedRecognizer

        app = application(SharedRecognizer(recognizer), args.model or "english", args.at_once, args.max_mib)
        host, port = listening.getsockname()[:2]
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        print(f"asr.serve: http://{place}/v1/audio/transcriptions", file=sys.stderr, flush=True)
        uvicorn.Server(uvicorn.Config(app)).run(sockets=[listening])


class Asked(NamedTuple):
    """What a request asks for."""

    upload: UploadFile
    response_format: str
    word_times: bool  # all words in one list, beside those of each segment
    options: dict[str, Any]  # of the search


def asked_for(form: FormData) -> Asked:
    """What the fields of a request say. Raises ValueError."""
    given = {name: value for name, value in form.multi_items() if value != ""}
    if unknown := next((name for name in given if name not in FIELDS), None):
        raise ValueError(f"{unknown} is not known here; fields are {', '.join(FIELDS)}")
    if isinstance(given.get("file", ""), str):
        raise ValueError("file must be a sound file")
    if texts := [name for name, value in given.items() if name != "file" and not isinstance(value, str)]:
        raise ValueError(f"{texts[0]} must be text, not a file")
    response_format = given.get("response_format", "json")
    if response_format not in MEDIA:
        raise ValueError(f"response_format is one of {', '.join(MEDIA)}, not {response_format}")
    granularities = form.getlist("timestamp_granularities[]")
    if wrong := set(granularities) - {"word", "segment"}:
        raise ValueError(f"timestamp_granularities[] are word and segment, not {', '.join(wrong)}")
    options: dict[str, Any] = {}
    if phrases := given.get("phrases"):
        options["phrases"] = tuple(line for line in phrases.splitlines() if line.strip())
    if weight := given.get("phrase_weight"):
        try:
            options["phrase_weight"] = float(weight)
        except ValueError:
            raise ValueError(f"phrase_weight must be a number, not {weight}") from None
    return Asked(given["file"], response_format, "word" in granularities, options)


def written(transcript: Transcript, asked: Asked) -> str:
    """The body of the answer."""
    if asked.response_format == "json":
        return json.dumps({"text": transcript.text}, ensure_ascii=False)
    if asked.response_format != "verbose_json":
        return FORMATS[asked.response_format](transcript)
    known = {"task": "transcribe", **as_dict(transcript)}
    known["segments"] = [{"id": i, **segment} for i, segment in enumerate(known["segments"])]
    if asked.word_times:
        known["words"] = [word for segment in known["segments"] for word in segment["words"]]
    return json.dumps(known, ensure_ascii=False)


def application(shared: SharedRecognizer, name: str, at_once: int, max_mib: float) -> Starlette:
    """The ASGI application, for any server, or to be mounted in another: `name` is what clients are told that the model
    is called; `at_once` recordings are read at a time; a request of more than `max_mib` is refused."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from asr.decode.sharing import Abandoned

    readers = ThreadPoolExecutor(at_once)

    def transcribe(asked: Asked, gone: threading.Event) -> Transcript:
        sound = io.BytesIO(asked.upload.file.read())
        sound.name = asked.upload.filename
        try:
            own = shared.recognizer.with_options(**asked.options)
        except ValueError as error:
            raise HTTPException(400, str(error)) from None
        return shared.transcribe(sound, own, lambda: not gone.is_set())

    async def transcriptions(request: Request) -> Response:
        size = request.headers.get("content-length")
        if size is None:
            raise HTTPException(411, "the request must have a Content-Length")
        if int(size) > max_mib * 2**20:
            raise HTTPException(413, f"the request has {int(size) / 2**20:.1f} MiB, at most {max_mib:g} are taken")
        async with request.form(max_files=1) as form:
            try:
                asked = asked_for(form)
            except ValueError as error:
                raise HTTPException(400, str(error)) from None
            gone = threading.Event()
            work = asyncio.get_running_loop().run_in_executor(readers, partial(transcribe, asked, gone))
            while not (await asyncio.wait([work], timeout=1.0))[0]:
                if await request.is_disconnected():
                    gone.set()
            transcript = work.result()
        if transcript.error:
            return refusal(400, transcript.error, text=transcript.text)
        return Response(written(transcript, asked), media_type=MEDIA[asked.response_format])

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model", "owned_by": "asr"}]})

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    def refusal(status: int, message: str, **more: str) -> Response:
        kind = "invalid_request_error" if status < 500 else "server_error"
        return JSONResponse({"error": {"message": message, "type": kind}, **more}, status)

    async def refused(_: Request, error: HTTPException) -> Response:
        return refusal(error.status_code, error.detail)

    async def abandoned(_: Request, error: Abandoned) -> Response:
        return refusal(499, "the client has gone")

    async def failed(_: Request, error: Exception) -> Response:
        return refusal(500, "the server failed, and has logged why")

    return Starlette(
        routes=[
            Route("/v1/audio/transcriptions", transcriptions, methods=["POST"]),
            Route("/v1/models", models),
            Route("/health", health),
        ],
        exception_handlers={HTTPException: refused, Abandoned: abandoned, Exception: failed},
    )


if __name__ == "__main__":
    main()
