#!/usr/bin/env python3
"""Whisper tiny.en in three runtimes: on the same machine, in one run, each in a process of its own.

    python benchmarks/whispers.py CORPUS [--weights DIR] [--vocabulary gpt2.tiktoken] [--threads 1] [--limit 100]

Windows of 30 s, no timestamps, no fallback. The columns: seconds of audio per CPU second from samples to text, without
start-up; WER with both sides through our normaliser; transcripts identical to OpenAI's with the same search. DIR holds
`tiny.en.pt`, from which our model is made, and `faster-whisper-tiny.en/`. A row whose package or weights are missing
says so. Packages: openai-whisper, faster-whisper, tiktoken.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from decode import samples, write_sounds
from rows import measured

BEAM = 5


def ours(beam_size: int, precision: str) -> Callable:
    def start(args: argparse.Namespace) -> Callable:
        import asr
        from asr.decode.options import DecodeOptions

        options = DecodeOptions("beam" if beam_size > 1 else "greedy", beam_size, ctc_weight=0.0)
        model = args.weights / "tiny.en"
        recognizer = asr.load(model, "cpu", options=options, precision=precision)
        return lambda sounds: [transcript.text for transcript in recognizer.transcribe_all(sounds)]

    return start


def openai(beam_size: int) -> Callable:
    def start(args: argparse.Namespace) -> Callable:
        import whisper

        model = whisper.load_model(str(args.weights / "tiny.en.pt"), device="cpu")
        options = whisper.DecodingOptions(
            language="en", without_timestamps=True, fp16=False, beam_size=beam_size if beam_size > 1 else None
        )

        def run(sounds):
            mels = (whisper.log_mel_spectrogram(whisper.pad_or_trim(sound)) for sound in sounds)
            return [whisper.decode(model, mel, options).text for mel in mels]

        return run

    return start


def faster_whisper(compute_type: str) -> Callable:
    def start(args: argparse.Namespace) -> Callable:
        from faster_whisper import WhisperModel

        threads = int(os.environ["OMP_NUM_THREADS"])
        folder = str(args.weights / "faster-whisper-tiny.en")
        model = WhisperModel(folder, device="cpu", compute_type=compute_type, cpu_threads=threads)
        settings = {"beam_size": BEAM, "without_timestamps": True, "temperature": 0.0}

        def run(sounds):
            found = (model.transcribe(sound, language="en", **settings)[0] for sound in sounds)
            return [" ".join(segment.text for segment in segments) for segments in found]

        return run

    return start


ROWS: dict[str, Callable] = {
    "openai-whisper, greedy, float32": openai(1),
    "asr, greedy, float32": ours(1, "float32"),
    "asr, greedy, bfloat16": ours(1, "bfloat16"),
    "openai-whisper, beam 5, float32": openai(BEAM),
    "faster-whisper, beam 5, float32": faster_whisper("float32"),
    "faster-whisper, beam 5, int8": faster_whisper("int8"),
    "asr, beam 5, float32": ours(BEAM, "float32"),
    "asr, beam 5, int8": ours(BEAM, "int8"),
    "asr, beam 5, bfloat16": ours(BEAM, "bfloat16"),
}


def row(args: argparse.Namespace) -> dict:
    import warnings

    warnings.simplefilter("ignore")
    sounds = [samples(str(path)) for path in sorted(args.sounds.glob("*.wav"))]
    run = ROWS[args.row](args)
    run(sounds[:2])
    used = time.process_time()
    texts = run(sounds)
    return {"texts": texts, "used": time.process_time() - used}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpus")
    parser.add_argument("--weights", type=Path, default=Path("weights"))
    parser.add_argument("--limit", type=int, default=100, help="utterances")
    parser.add_argument("--vocabulary", type=Path, help="default: the one in openai-whisper's package")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    parser.add_argument("--sounds", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.row:
        print(json.dumps(row(args)))
        return
    from asr.decode.scoring import word_errors
    from asr.model.foreign import import_model
    from asr.text.normalizer import english

    if not args.vocabulary:
        package = importlib.util.find_spec("whisper")
        if package is None:
            parser.error("--vocabulary: openai-whisper, which has one, is not installed")
        args.vocabulary = Path(package.origin).parent / "assets" / "gpt2.tiktoken"
    try:
        import_model(args.weights / "tiny.en.pt", args.vocabulary).save(args.weights / "tiny.en")
    except ValueError as error:
        parser.error(str(error))
    print("| Whisper tiny.en | s of audio per CPU second | WER % | as OpenAI's |\n| --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        said, seconds = write_sounds(args.corpus, args.limit, Path(folder))
        theirs: dict[str, list[str]] = {}
        for name in ROWS:
            command = [*sys.argv, "--row", name, "--sounds", folder]
            figures = measured(command, args.threads)
            if isinstance(figures, str):
                print(f"| {name} | {figures} | | |", flush=True)
                continue
            texts = [text.strip() for text in figures["texts"]]
            search = "greedy" if "greedy" in name else "beam"
            reference = theirs.setdefault(search, texts) if name.startswith("openai") else theirs.get(search, [])
            same = sum(a == b for a, b in zip(texts, reference, strict=False))
            wer = word_errors(said, [english(text) for text in texts]).rate
            print(f"| {name} | {seconds / figures['used']:.1f} | {wer:.2f} | {same} of {len(texts)} |", flush=True)


if __name__ == "__main__":
    main()
