"""Transcribes recordings on the command line: `python -m asr.transcribe file.wav`. For a model that reads text, the
inputs are the lines of text files.

Exit code 0 if every file was transcribed, 1 if some could not be read to the end (the others are transcribed, and so is
the part before the error), 2 for a wrong option or model.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from asr.commands import (
    add_decoding_options,
    add_nbest,
    first_repeated,
    guarded,
    load_recognizer,
    progress_bar,
    say,
)
from asr.formats import FORMATS, ctm_name

UNFINISHED = ".unfinished"  # suffix of a file's name while it is being written


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asr-transcribe", description="Transcribes recordings.")
    parser.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="audio (wav, flac, ogg, opus, mp3, ...) or a folder of it; - for stdin; or other input of the model",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="text",
        help="json: one object per file; srt, vtt: subtitles; ctm: word times",
    )
    parser.add_argument("--json", dest="format", action="store_const", const="json", help="the same as --format json")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for one file per transcript")
    parser.add_argument(
        "--skip-existing", action="store_true", help="skip recordings whose transcript is already in --out"
    )
    parser.add_argument(
        "--channel", type=int, metavar="N", help="use only this channel, from 0 on (default: the mean of all)"
    )
    add_decoding_options(parser)
    add_nbest(parser)
    return parser


@guarded("asr.transcribe")
def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    recognizer = load_recognizer(args)
    is_text = recognizer.takes == "text"
    if args.format != "json" and (args.nbest or 1) > 1:
        raise ValueError(f"--nbest is for --format json: {args.format} shows one hypothesis")
    if args.skip_existing and not args.out:
        raise ValueError("--skip-existing is for --out")
    failed: list[object] = []

    def skip(error: object) -> None:
        failed.append(error)
        print(f"asr.transcribe: {error}", file=sys.stderr)

    files, names = _lines(args.files, skip) if is_text else _files(args.files, recognizer.takes, skip)
    places = _places(files, names, args, is_text)
    if args.skip_existing:
        new = [i for i, place in enumerate(places) if place is None or not place.exists()]
        files, places = [files[i] for i in new], [places[i] for i in new]
    if args.format != "text" and recognizer.model.transformer.ctc and not is_text:
        recognizer.word_times = True
    elif args.format == "ctm":
        raise ValueError("--format ctm needs the times of words, which a model without CTC does not have")
    named = len(files) > 1 and not is_text
    with progress_bar(_seconds(files) if sys.stderr.isatty() and not is_text else 0.0) as advance:
        for transcript, place in zip(recognizer.transcribe_all(files, advance), places, strict=True):
            if transcript.error:
                skip(transcript.error)
                if not transcript.segments and (place or args.format != "json"):
                    continue
                place = place and place.with_stem(f"{place.stem}.part")
            text = FORMATS[args.format](transcript)
            if place:
                _write(place, text)
            else:
                name = f"{transcript.name}: " if named and args.format == "text" else ""
                say(f"{name}{text}")
    sys.exit(1 if failed else 0)


def _write(place: Path, text: str) -> None:
    unfinished = place.with_name(f".{place.name}{UNFINISHED}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        if place.exists() and not place.stem.endswith(".part"):
            raise FileExistsError(f"{place} is there already")
        unfinished.rename(place)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise ValueError(f"--out: {error}") from None


def _places(files: list[str], names: list[str], args: argparse.Namespace, is_text: bool) -> list[Path | None]:
    """The output file of each transcript, from its name; None: the transcript is printed."""
    timed = args.format in ("srt", "vtt", "ctm")
    if is_text and (args.out or timed):
        raise ValueError("this model reads text, whose lines are printed as text or as JSON")
    if not args.out:
        if len(files) > 1 and args.format in ("srt", "vtt"):
            raise ValueError(f"--format {args.format} of several files needs a folder for them: --out DIR")
        if args.format == "ctm" and (twice := first_repeated(ctm_name(Path(file).stem) for file in files)):
            raise ValueError(f"--format ctm: several of the files would be called {twice}")
        return [None] * len(files)
    if args.out.is_file():
        raise ValueError(f"--out: {args.out} is a file, and transcripts go into a folder")
    suffix = ".txt" if args.format == "text" else f".{args.format}"
    places = [args.out / f"{name}{suffix}" for name in names]
    parts = [place.with_stem(f"{place.stem}.part") for place in places]  # for recordings that cannot be read to the end
    if twice := first_repeated([*places, *parts]):
        raise ValueError(f"--out: several of the files would be written to {twice}")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        there = next((place for place in (*places, *parts) if place.exists()), None)
        for part in parts:
            part.with_name(f".{part.name}{UNFINISHED}").exists()  # the longest name in use
    except OSError as error:  # also for a name that is too long
        raise ValueError(f"--out: {error}") from None
    if there and not args.skip_existing:
        raise ValueError(f"--out: {there} exists already (--skip-existing continues with the others)")
    return places


def _files(arguments: list[str], takes: str, skip: Callable[[object], None]) -> tuple[list[str], list[str]]:
    """The arguments, with each folder replaced by the audio files (or matrices) under it; and their names without
    suffix, in a folder the paths within it. `skip` is called for each folder that cannot be read."""
    from asr.audio.matrices import MATRIX_SUFFIXES
    from asr.audio.reading import AUDIO_SUFFIXES, files_under

    suffixes = MATRIX_SUFFIXES if takes == "matrix" else AUDIO_SUFFIXES
    found, names = [], []
    for argument in arguments:
        if argument == "-" or not os.path.isdir(argument):
            found.append(argument)
            names.append("stdin" if argument == "-" else Path(argument).stem)
            continue
        inside = [path for path in sorted(files_under(argument, skip)) if path.suffix.lower() in suffixes]
        if not inside:
            raise ValueError(f"{argument}: no {takes} in this folder")
        found += map(str, inside)
        names += [str(path.relative_to(argument).with_suffix("")) for path in inside]
    return found, names


def _lines(files: list[str], skip: Callable[[object], None]) -> tuple[list[str], list[str]]:
    """The lines of the files, which have no names. `skip` is called for each file that cannot be read."""
    from asr.audio.reading import AudioError, read_lines

    lines: list[str] = []
    for file in files:
        try:
            lines += list(read_lines(file))
        except AudioError as error:
            skip(error)
    return lines, []


def _seconds(files: list[str]) -> float:
    from asr.audio.reading import AudioError, read_duration

    total = 0.0
    for file in files:
        with contextlib.suppress(AudioError):
            total += read_duration(file) if Path(file).is_file() else 0.0  # a pipe can be read only once
    return total


if __name__ == "__main__":
    main()
