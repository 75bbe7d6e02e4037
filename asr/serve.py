"""A transcription server with OpenAI's interface: `python -m asr.serve`, then `POST /v1/audio/transcriptions`.

Requests that arrive at the same time are decoded together. `docs/serving.md` has examples and figures. Exit code 2 for
a wrong option or model, or an address that is in use.
"""

from __future__ import annotations

import argparse
import socket
import sys

from asr.commands import add_decoding_options, add_nbest, guarded, load_recognizer

LARGEST_EVENT = 16 * 2**20  # bytes of a realtime event


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asr-serve", description="Serves transcription over HTTP, with OpenAI's POST /v1/audio/transcriptions."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1; 0.0.0.0: all)")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0 picks a free one")
    group = parser.add_argument_group("limits")
    group.add_argument("--at-once", type=int, default=16, help="recordings read at once; others wait (default: 16)")
    group.add_argument(
        "--max-waiting", type=int, default=100, help="requests that may wait; more are refused (default: 100)"
    )
    group.add_argument("--streams", type=int, default=16, help="realtime connections at once (default: 16)")
    group.add_argument("--max-mib", type=float, default=200.0, help="largest upload in MiB (default: 200)")
    group.add_argument(
        "--max-seconds", type=float, default=14_400.0, help="longest recording in seconds (default: 14400, 4 h)"
    )
    group.add_argument("--grace-seconds", type=int, default=30, help="seconds to answer in after SIGTERM (default: 30)")
    add_decoding_options(parser, batch_seconds=120.0)
    add_nbest(parser)
    return parser


@guarded("asr.serve")
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    for name in ("at_once", "streams", "max_mib", "max_seconds"):
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive, not {getattr(args, name)}")
    if min(args.max_waiting, args.grace_seconds) < 0:
        raise ValueError("--max-waiting and --grace-seconds must not be negative")
    if not 0 <= args.port < 2**16:
        raise ValueError(f"--port lies between 0 and 65535, and is {args.port}")
    try:
        import uvicorn
        import websockets  # noqa: F401 (uvicorn would only miss it later)

        from asr.service import Limits, application
    except ImportError as error:
        raise ValueError(f"{error.name} is missing: pip install '.[serve]'") from None
    try:
        family, *_, address = socket.getaddrinfo(args.host, args.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ValueError(f"--host {args.host}: {error.strerror}") from None
    with socket.create_server(address[:2], family=family) as listening:
        recognizer = load_recognizer(args)
        if recognizer.takes != "sound":
            raise ValueError(f"--model: the server takes sound, but this model takes {recognizer.takes}")
        recognizer.word_times = recognizer.model.transformer.ctc is not None
        limits = Limits(args.at_once, args.max_waiting, args.max_mib, args.max_seconds, args.streams)
        app = application(recognizer, args.model or "english", limits)
        host, port = listening.getsockname()[:2]
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        print(f"asr.serve: http://{place}/v1/audio/transcriptions", file=sys.stderr, flush=True)
        sockets = {"ws": "websockets-sansio", "ws_max_size": LARGEST_EVENT}
        server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=args.grace_seconds, **sockets))
        server.run(sockets=[listening])


if __name__ == "__main__":
    main()
