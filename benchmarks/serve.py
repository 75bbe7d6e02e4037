#!/usr/bin/env python3
"""`asr.serve` under load: how much it transcribes, and how long clients wait.

    python benchmarks/serve.py CORPUS [--limit 100] [--clients 1 4 16] [--threads 2] [--long 600] [--options="..."]
    python benchmarks/serve.py CORPUS --realtime [--limit 30] [--clients 1 4 8]

Several clients run at once: each sends an utterance, waits for its transcript, sends the next. Their own work runs on
the same machine. `together` is the server as it is, `one by one` decodes one piece at a time (`--batch-seconds 1`).
With `--long`, another client keeps sending a recording of that many seconds. With `--realtime`, each client speaks all
utterances, in its own order, into a realtime session, and the wait is the time from the end of an item's speech to its
transcript; half a second of it is the pause that ends the item.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import requests
import soundfile
from decode import samples, write_sounds
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

PAUSE = 1.0  # seconds between a client's utterances
BATCHES = {"together": [], "one by one": ["--batch-seconds", "1"]}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", help="a corpus in any form")
    parser.add_argument("--limit", type=int, default=100, help="utterances of it")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16], help="at once, a row each")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the server")
    parser.add_argument("--long", type=float, default=0.0, help="seconds of a recording that another client sends")
    parser.add_argument("--realtime", action="store_true", help="clients that speak")
    parser.add_argument("--options", default="", help="of asr.serve")
    return parser


def main() -> None:
    args = parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _, seconds = write_sounds(args.corpus, args.limit, Path(folder))
        paths = sorted(Path(folder).glob("*.wav"))
        if args.realtime:
            print("| clients | median s | 95 % below | deltas per minute of audio |")
            print("| --- | --- | --- | --- |")
            for clients in args.clients:
                waited, deltas = while_spoken(paths, clients, args.threads, shlex.split(args.options))
                p50, p95 = np.percentile(waited, [50, 95])
                rate = deltas / clients / (seconds + len(paths) * PAUSE) * 60
                print(f"| {clients} | {p50:.2f} | {p95:.2f} | {rate:.0f} |", flush=True)
            return
        long = Path(folder, "long.flac")
        if args.long:
            sounds = [samples(str(path)) for path in paths]
            whole = np.concatenate(sounds * (1 + int(args.long / seconds)))[: round(args.long * 16_000)]
            soundfile.write(long, whole, 16_000)
        print("| batches | clients | s of audio per second | requests per second | median s | 95 % below |")
        print("| --- | --- | --- | --- | --- | --- |")
        for name, options in BATCHES.items():
            for clients in args.clients:
                waited, took = under_load(
                    paths, clients, args.threads, long if args.long else None, [*options, *shlex.split(args.options)]
                )
                p50, p95 = np.percentile(waited, [50, 95])
                rates = f"{seconds / took:.0f} | {len(paths) / took:.1f}"
                print(f"| {name} | {clients} | {rates} | {p50:.2f} | {p95:.2f} |", flush=True)


@contextlib.contextmanager
def serving(threads: int, options: list[str]) -> Iterator[str]:
    """Starts a server; yields the address to post recordings to."""
    command = [sys.executable, "-m", "asr.serve", "--port", "0", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as server:
        address = server.stderr.readline().split()[1]
        threading.Thread(target=server.stderr.read, daemon=True).start()  # or the server would block on a full pipe
        try:
            yield address
        finally:  # or Popen would wait for the server when a client fails
            server.kill()


def under_load(
    paths: list[Path], clients: int, threads: int, long: Path | None, options: list[str]
) -> tuple[list[float], float]:
    """How long each request waited, and how long all of them took, in seconds."""
    with serving(threads, options) as address:

        def ask(path: Path) -> float:
            began = time.monotonic()
            with path.open("rb") as sound:
                answer = requests.post(address, files={"file": sound}, timeout=600)
            answer.raise_for_status()
            return time.monotonic() - began

        def ask_again() -> None:
            with contextlib.suppress(requests.ConnectionError):  # the server has ended
                while True:
                    ask(long)

        ask(paths[0])  # warms up
        if long:
            threading.Thread(target=ask_again, daemon=True).start()
            time.sleep(1.0)
        began = time.monotonic()
        with ThreadPoolExecutor(clients) as pool:
            waited = list(pool.map(ask, paths))
        took = time.monotonic() - began
    return waited, took


def while_spoken(paths: list[Path], clients: int, threads: int, options: list[str]) -> tuple[list[float], int]:
    """The seconds from the end of each item's speech to its transcript, and the number of deltas to all clients."""
    with serving(threads, options) as address:
        address = address.replace("http", "ws").replace("audio/transcriptions", "realtime")

        def speak(client: int) -> tuple[list[float], int]:
            order = np.random.default_rng(client).permutation(len(paths))
            silence = np.zeros(round(PAUSE * 16_000), np.float32)
            sound = np.concatenate([part for i in order for part in (samples(str(paths[i])), silence)])
            raw, waited, deltas = (sound * 32767).astype("<i2").tobytes(), [], 0
            with connect(address) as session:
                form = {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 16_000}}}}
                session.send(json.dumps({"type": "session.update", "session": form}))
                while json.loads(session.recv())["type"] != "session.updated":
                    pass
                began = time.monotonic()

                def send() -> None:
                    with contextlib.suppress(ConnectionClosed):  # the last transcript came before the last silence
                        for place in range(0, len(raw), 3_200):  # a tenth of a second
                            time.sleep(max(0.0, began + (place + 3_200) / 32_000 - time.monotonic()))
                            audio = base64.b64encode(raw[place : place + 3_200]).decode()
                            session.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))

                threading.Thread(target=send, daemon=True).start()
                end = 0.0
                while end < len(sound) / 16_000 - 2 * PAUSE:
                    event = json.loads(session.recv(timeout=60))
                    deltas += event["type"].endswith(".delta")
                    if event["type"] == "input_audio_buffer.speech_stopped":
                        end = event["audio_end_ms"] / 1000
                    elif event["type"].endswith(".completed"):
                        waited.append(time.monotonic() - began - end)
            return waited, deltas

        with ThreadPoolExecutor(clients) as pool:
            waits, deltas = zip(*pool.map(speak, range(clients)), strict=True)
    return [wait for waited in waits for wait in waited], sum(deltas)


if __name__ == "__main__":
    main()
