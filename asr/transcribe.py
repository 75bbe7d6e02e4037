"""Recordings to text, on the command line: `python -m asr.transcribe file.wav`. For a model that reads text: the lines
of text files.

Exit code 0 where every file was transcribed, 1 where some could not be read (the others are), 2 for a wrong option or
model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys

from asr.commands import add_decoding_options, fail, load_recognizer, progress_bar


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asr-transcribe", description="Transcribes recordings.")
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="sound (wav, flac, ogg, opus, mp3, ...), or a folder of it; - is stdin; or what else the model takes",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a file: text, segments, n-best, scores")
    add_decoding_options(parser)
    return parser


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    try:
        recognizer = load_recognizer(args)
    except ValueError as error:
        fail("asr.transcribe", error)
    is_text = recognizer.takes == "text"
    failed, files = _lines(args.files) if is_text else (False, _files(args.files, recognizer.takes))
    named = len(files) > 1 and not is_text
    with progress_bar(_seconds(files) if sys.stderr.isatty() and not is_text else 0.0) as advance:
        for transcript in recognizer.transcribe_all(files, advance):
            if transcript.error:
                failed = True
                print(f"asr.transcribe: {transcript.error}", file=sys.stderr)
            if args.json:
                print(json.dumps(_description(transcript), ensure_ascii=False), flush=True)
            elif not transcript.error:
                name = f"{transcript.name}: " if named else ""
                print(f"{name}{transcript.text}", flush=True)
    sys.exit(1 if failed else 0)


def _description(transcript) -> dict:
    if transcript.error:
        return {"file": transcript.name, "error": transcript.error}
    segments = [
        {
            "start": round(segment.start, 3),
            "end": round(segment.end, 3),
            "text": segment.text,
            "score": round(segment.score, 4),
            "words": [{"word": word.text, "confidence": round(word.confidence, 4)} for word in segment.words],
            "nbest": [{"text": text, "score": round(score, 4)} for text, score in segment.nbest],
        }
        for segment in transcript.segments
    ]
    duration = round(transcript.duration, 3)
    return {"file": transcript.name, "text": transcript.text, "duration": duration, "segments": segments}


def _files(arguments: list[str], takes: str) -> list[str]:
    """The arguments, each folder among them replaced by the sound (or the matrices) under it."""
    from pathlib import Path

    from asr.audio.reading import AUDIO_SUFFIXES, MATRIX_SUFFIXES

    suffixes = MATRIX_SUFFIXES if takes == "matrix" else AUDIO_SUFFIXES
    found = []
    for argument in arguments:
        if argument == "-" or not Path(argument).is_dir():
            found.append(argument)
            continue
        inside = [str(path) for path in sorted(Path(argument).rglob("*")) if path.suffix.lower() in suffixes]
        if not inside:
            fail("asr.transcribe", f"{argument}: no {takes} in this folder")
        found += inside
    return found


def _lines(files: list[str]) -> tuple[bool, list[str]]:
    """Whether some file could not be read (each has its line on standard error), and the lines of the others."""
    from asr.audio.reading import AudioError, read_lines

    failed, lines = False, []
    for file in files:
        try:
            lines += list(read_lines(file))
        except AudioError as error:
            failed = True
            print(f"asr.transcribe: {error}", file=sys.stderr)
    return failed, lines


def _seconds(files: list[str]) -> float:
    from asr.audio.reading import AudioError, read_duration

    total = 0.0
    for file in files:
        with contextlib.suppress(AudioError):
            total += read_duration(file) if file != "-" else 0.0
    return total


if __name__ == "__main__":
    main()
