"""A folder of audio (or feature matrices) with a `.txt` next to each file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asr.audio.matrices import MATRIX_SUFFIXES
from asr.audio.reading import AUDIO_SUFFIXES, AudioError, files_under, printable, read_lines
from asr.corpus.utterances import Utterance


def read_folder(folder: Path, transcribed: bool = True) -> Iterator[Utterance]:
    """The utterances under `folder`; their ids are paths relative to it, without suffix. In a `transcribed` corpus one
    without a `.txt`, or whose `.txt` is not in UTF-8, is an utterance with a fault. Raises ValueError if there are no
    utterances."""
    found = False
    for path in sorted(files_under(folder)):
        if path.suffix.lower() not in AUDIO_SUFFIXES | MATRIX_SUFFIXES:
            continue
        transcript, text, fault = path.with_suffix(".txt"), "", None
        try:
            if transcribed and not transcript.is_file():
                fault = "no .txt with its transcript beside it"
            else:
                found = True
                text = " ".join(" ".join(read_lines(transcript)).split()) if transcribed else ""
        except AudioError as error:
            fault = str(error)
        yield Utterance(printable(path.relative_to(folder).with_suffix("")), path, text, fault=fault)
    if not found:
        beside = " with a .txt of the same name beside it" if transcribed else ""
        raise ValueError(f"{folder}: no audio file{beside}")
