"""Transcribes speech while it is spoken, from raw samples on standard input: `arecord -q -t raw -f S16_LE -r 16000 |
python -m asr.listen`.

On a terminal, words are shown as they become known. Ctrl-C ends the command once everything said so far is transcribed.
Exit code 2 for a wrong option or model, or for input that begins as a WAV, FLAC, Ogg or tagged MP3 file does: anything
else is taken for raw samples.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import select
import shutil
import signal
import sys
import threading
from typing import TYPE_CHECKING

from asr.commands import add_decoding_options, guarded, load_recognizer, say

if TYPE_CHECKING:
    from asr.decode.listening import Heard

BLOCK = 2**14  # most bytes read at once
MOST_BLOCKS = 1000  # that wait for a recogniser slower than real time; then the input waits
HEADERS = {b"RIFF": "WAV", b"fLaC": "FLAC", b"OggS": "Ogg", b"ID3": "MP3"}
ERASE, DIM, PLAIN = "\r\033[K", "\033[2m", "\033[0m"  # terminal control sequences


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="asr-listen",
        description="Transcribes live speech: raw 16-bit samples, one channel, from standard input.",
    )
    parser.add_argument("--rate", type=int, default=16_000, metavar="HZ", help="samples per second (default: 16000)")
    parser.add_argument(
        "--format",
        choices=("text", "json"),
        default="text",
        help="text: a line for each stretch of speech that a pause ends; json: an object per line, drafts included",
    )
    parser.add_argument(
        "--drafts",
        metavar="STRATEGY",
        help="search for drafts: rescore, greedy or ctc, the fastest (default: rescore; greedy without CTC)",
    )
    parser.add_argument("--every", type=float, help="minimum seconds between two drafts (default: 0.5)")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds of silence that end a piece (default: 0.5)")
    add_decoding_options(parser, batch_seconds=None)
    return parser


@guarded("asr.listen")
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    for name, least, most in (("rate", 4_000, 768_000), ("every", 0.1, 60.0), ("pause", 0.2, 60.0)):
        if (value := getattr(args, name)) is not None and not least <= value <= most:
            raise ValueError(f"--{name} lies between {least} and {most}, and is {value}")
    write = _as_json if args.format == "json" else _on_terminal if sys.stdout.isatty() else _as_text
    if write is _as_text and (args.drafts or args.every):
        raise ValueError("--drafts and --every are for a terminal, or for --format json: lines of text have no drafts")
    if sys.stdin is None or sys.stdin.isatty():
        raise ValueError("pipe sound into it: arecord -q -t raw -f S16_LE -r 16000 | python -m asr.listen")
    inbox: queue.Queue[bytes | None] = queue.Queue(MOST_BLOCKS)
    ended = threading.Event()
    failed: list[Exception] = []
    threading.Thread(target=_read, args=(sys.stdin.fileno(), inbox, ended, failed), daemon=True).start()
    recognizer = load_recognizer(args)
    recognizer.word_times = args.format == "json" and recognizer.model.transformer.ctc is not None

    from asr.audio.reading import resampled
    from asr.decode.listening import DRAFTS, EVERY, drafter_of, drained, listen

    if args.drafts not in (None, *DRAFTS):
        raise ValueError(f"--drafts must be one of {', '.join(DRAFTS)}, not {args.drafts}")

    def end(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ended.set()

    signal.signal(signal.SIGINT, end)
    drafter = None if write is _as_text else drafter_of(recognizer, args.drafts)
    for heard in listen(recognizer, resampled(drained(inbox), args.rate), drafter, args.every or EVERY, args.pause):
        write(heard)
    if failed:
        raise failed[0]


def _read(descriptor: int, inbox: queue.Queue[bytes | None], ended: threading.Event, failed: list[Exception]) -> None:
    """Puts the blocks of input into `inbox`, then None; puts an error that ends the input early into `failed`."""
    is_first = True
    try:
        while not ended.is_set():
            if select.select([descriptor], [], [], 0.1)[0]:
                block = os.read(descriptor, BLOCK)
                if not block:
                    break
                if is_first and (kind := next((HEADERS[head] for head in HEADERS if block.startswith(head)), None)):
                    raise ValueError(
                        f"standard input is {kind}, not raw samples: ffmpeg -i - -f s16le -ar 16000 -ac 1 -"
                    )
                inbox.put(block)
                is_first = False
    except (OSError, ValueError) as error:
        failed.append(error)
    inbox.put(None)


def _as_text(heard: Heard) -> None:
    for segment in heard.segments:
        say(f"{segment.text}\n")


def _as_json(heard: Heard) -> None:
    from asr.formats import segment_as_dict

    for segment in heard.segments:
        say(json.dumps({"type": "segment", **segment_as_dict(segment)}, ensure_ascii=False) + "\n")
    if heard.start is not None or not heard.segments:
        start = None if heard.start is None else round(heard.start, 3)  # None: what was heard turned out to be no word
        draft = {"start": start, "settled": heard.settled, "tentative": heard.tentative}
        say(json.dumps({"type": "draft", **draft}, ensure_ascii=False) + "\n")


def _on_terminal(heard: Heard) -> None:
    """Shows what is being said as the last line, as much of its end as fits; what may still change is dim."""
    from rich.cells import cell_len

    say(ERASE)
    _as_text(heard)
    parts, room = [], shutil.get_terminal_size().columns - 2
    for text in (heard.tentative, heard.settled):
        while text and cell_len(text) > room:
            text = text[1:]
        parts.append(text)
        room -= cell_len(text)
    tentative, settled = parts
    say(f"{settled} {DIM}{tentative}{PLAIN}")


if __name__ == "__main__":
    main()
