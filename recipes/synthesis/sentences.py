#!/usr/bin/env python3
"""Synthesise speech for training: sentences of a text, each in another voice and at its own speed.

    python recipes/synthesis/sentences.py --text books.txt.xz --exclude test.jsonl.gz --utterances 8000 --out synthetic

The engines are hibari and flite (`quick.py`), or with `--kokoro kokoro-int8.onnx --voices voices` Kokoro (`kokoro.py`),
at a fifteenth of the speed. Both files say where the engines come from. OUT gets one FLAC per utterance and, once all
are there, `manifest.jsonl` (one JSON object per line, as in NeMo), whose `speaker` names the voice. An interrupted run
continues where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import soundfile

from asr.audio.reading import SAMPLE_RATE
from asr.corpus import open_corpus
from asr.text.normalizer import english
from asr.training.text import lines_of

if TYPE_CHECKING:
    from kokoro import Blends
    from quick import Quick

WORDS = (3, 30)  # fewest and most in a sentence
SPEEDS = (0.85, 1.25)
PACE = (5, 30)  # letters per second; outside, the text was not spoken completely, or not at all
SHARED = 6  # consecutive words that a sentence must not share with what is excluded


def runs(words: list[str]) -> Iterator[tuple[str, ...]]:
    """Every run of `SHARED` consecutive words; all words as one run if there are fewer."""
    return (tuple(words[i : i + SHARED]) for i in range(max(1, len(words) - SHARED + 1)))


def said_in(corpora: list[str]) -> set[tuple[str, ...]]:
    if not corpora:
        return set()
    return {run for cut in open_corpus(corpora) for run in runs(english(cut.supervisions[0].text).split())}


def speakable(lines: Iterable[str], excluded: set[tuple[str, ...]]) -> Iterator[str]:
    """The sentences of common letters and punctuation, neither long nor short, that share no run with `excluded`."""
    for line in map(str.strip, lines):
        plain = re.fullmatch(r"[A-Za-z ,.;:!?'-]+", line)
        words = english(line).split() if plain else []
        if WORDS[0] <= len(words) <= WORDS[1] and excluded.isdisjoint(runs(words)):
            yield line


@cache
def engine_of(model: Path | None, voices: Path | None) -> Blends | Quick:
    """The engine, loaded once per process."""
    if model and voices:
        from kokoro import Blends

        return Blends(model, voices)
    from quick import Quick

    return Quick()


def say(text: str, args: argparse.Namespace) -> dict | None:
    """Speaks a sentence into a file, unless it exists; returns its manifest entry, None if it failed."""
    engine = engine_of(args.kokoro, args.voices)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    rng = np.random.default_rng([args.seed, int(digest, 16)])  # an utterance does not depend on those before it
    speaker, speed = engine.draw(rng), float(rng.uniform(*SPEEDS))
    name = f"synthetic{args.seed}-{digest}"
    path = args.out / f"{name}.flac"
    if not path.exists():
        try:
            samples = engine.speak(text, speaker, speed, rng)
        except Exception as error:  # the phonemiser's or the engine's; each has its own types
            print(f"left out {text!r}: {error!r}", flush=True)
            return None
        unfinished = path.with_suffix(".part")
        soundfile.write(unfinished, samples, SAMPLE_RATE, format="FLAC")
        unfinished.rename(path)
    seconds = soundfile.info(path).duration
    if not PACE[0] < len(text) / seconds < PACE[1]:
        print(f"left out {text!r}: {len(text)} letters in {seconds:.1f} s", flush=True)
        return None
    return {
        "id": name,
        "audio_filepath": path.name,
        "duration": seconds,
        "text": text,
        "speaker": str(speaker),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n", 1)[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--kokoro", type=Path, help="Kokoro's ONNX model")
    parser.add_argument("--voices", type=Path, help="folder of Kokoro's .bin voices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=Path, required=True, help="a sentence a line (.xz, .gz or plain)")
    parser.add_argument("--exclude", nargs="*", default=[], help="corpora that no sentence may repeat")
    parser.add_argument("--out", type=Path, required=True, help="folder for the sound and its manifest")
    parser.add_argument("--utterances", type=int, default=4000, metavar="N")
    parser.add_argument("--processes", type=int, default=1, metavar="N")
    args = parser.parse_args()
    if (args.kokoro is None) != (args.voices is None):
        parser.error("--kokoro and --voices: both, or neither")

    lines = list(dict.fromkeys(lines_of([str(args.text)])))
    np.random.default_rng(args.seed).shuffle(lines)
    chosen = list(islice(speakable(lines, said_in(args.exclude)), args.utterances))
    if len(chosen) < args.utterances:
        raise SystemExit(f"{args.text} has {len(chosen)} sentences that can be spoken, not {args.utterances}")
    args.out.mkdir(parents=True, exist_ok=True)
    entries = []
    with ProcessPoolExecutor(args.processes) as pool:
        for entry in pool.map(partial(say, args=args), chosen):
            if entry:
                entries.append(entry)
                if len(entries) % 1000 == 0:
                    print(f"{len(entries)} of {args.utterances}", flush=True)
    lines = "".join(json.dumps(entry) + "\n" for entry in entries)
    (args.out / "manifest.jsonl").write_text(lines, encoding="utf-8")
    hours = sum(entry["duration"] for entry in entries) / 3600
    print(f"{args.out}: {len(entries)} utterances, {hours:.2f} h")


if __name__ == "__main__":
    main()
