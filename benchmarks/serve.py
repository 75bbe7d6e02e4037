#!/usr/bin/env python3
"""`asr.serve` under load: how much it transcribes, and how long a client waits.

    python benchmarks/serve.py CORPUS [--limit 100] [--clients 1 4 16] [--threads 2] [--long 600] [--options="..."]

So many clients at once, each of which sends an utterance, waits for its transcript and sends the next; the clients' own
work is part of the machine's. `together` is the server as it is, `one by one` decodes a piece at a time
(`--batch-seconds 1`). With `--long` another client sends recordings of so many seconds meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import requests
import soundfile
from decode import samples, write_sounds

BATCHES = {"together": [], "one by one": ["--batch-seconds", "1"]}


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus", help="a corpus in any form")
    parser.add_argument("--limit", type=int, default=100, help="utterances of it")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16], help="at once, a row each")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the server")
    parser.add_argument("--long", type=float, default=0.0, help="seconds of a recording that another client sends")
    parser.add_argument("--options", default="", help="of asr.serve")
    return parser


def main() -> None:
    args = parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        _, seconds = write_sounds(args.corpus, args.limit, Path(folder))
        paths = sorted(Path(folder).glob("*.wav"))
        long = Path(folder, "long.flac")
        if args.long:
            sounds = [samples(str(path)) for path in paths]
            whole = np.concatenate(sounds * (1 + int(args.long / seconds)))[: round(args.long * 16_000)]
            soundfile.write(long, whole, 16_000)
        print("| batches | clients | s of sound a second | requests a second | median s | 95 % below |")
        print("| --- | --- | --- | --- | --- | --- |")
        for name, options in BATCHES.items():
            for clients in args.clients:
                waited, took = under_load(
                    paths, clients, args.threads, long if args.long else None, [*options, *shlex.split(args.options)]
                )
                p50, p95 = np.percentile(waited, [50, 95])
                rates = f"{seconds / took:.0f} | {len(paths) / took:.1f}"
                print(f"| {name} | {clients} | {rates} | {p50:.2f} | {p95:.2f} |", flush=True)


def under_load(
    paths: list[Path], clients: int, threads: int, long: Path | None, options: list[str]
) -> tuple[list[float], float]:
    """How long each request waited, and all of them took, in seconds, by a server of their own."""
    command = [sys.executable, "-m", "asr.serve", "--port", "0", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as server:
        address = server.stderr.readline().split()[1]
        threading.Thread(target=server.stderr.read, daemon=True).start()  # or it would wait for its reader

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

        ask(paths[0])  # what is done once
        if long:
            threading.Thread(target=ask_again, daemon=True).start()
            time.sleep(1.0)
        began = time.monotonic()
        with ThreadPoolExecutor(clients) as pool:
            waited = list(pool.map(ask, paths))
        took = time.monotonic() - began
        server.kill()
    return waited, took


if __name__ == "__main__":
    main()
