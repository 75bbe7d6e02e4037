"""A data directory of Kaldi or ESPnet: `wav.scp` (lines of an id and a file), `text` (an id and its words) and, if they
exist, `segments` (an id, a recording of `wav.scp`, start and end in seconds) and `utt2spk`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

from asr.audio.reading import read_lines
from asr.corpus.utterances import Utterance

# a command that only decodes its file, which is then read directly
_ONLY_DECODES = re.compile(r"(?:cat|flac(?: -[cds]+| --decode| --stdout| --silent)+) (\S+) \|")


def is_kaldi(folder: Path) -> bool:
    return (folder / "wav.scp").is_file()


def read_kaldi(folder: Path, transcribed: bool = True) -> Iterator[Utterance]:
    """The utterances of a data directory; one that has no text or no audio, whose audio a command makes, or whose line
    of `segments` is invalid, has a fault. Files are looked up from the working directory and from the folders above
    the data directory. Raises AudioError if `text` is missing."""
    recordings = _rows(folder / "wav.scp")
    sources = dict(recordings)
    texts = dict(_rows(folder / "text")) if transcribed else {}
    speakers = dict(_rows(folder / "utt2spk", needed=False))
    whole = [(name, f"{name} 0 -1") for name, _ in recordings]  # to the end
    segments = _rows(folder / "segments", needed=False)
    for name, place in segments or whole:
        try:
            recording, begin, end = place.split()
            begin, end = float(begin), float(end)
        except ValueError:
            yield Utterance(name, folder, "", fault=f"its line of segments, {place!r}, is not RECORDING BEGIN END")
            continue
        duration = None if end == -1 else end - begin
        source = sources.get(recording, "")
        if only_decoded := _ONLY_DECODES.fullmatch(source):
            source = only_decoded[1]
        fault = None
        if end == math.inf or not 0 <= begin < (math.inf if end == -1 else end):
            fault = f"it begins at {begin} and ends at {end}"
        elif not source:
            fault = f"wav.scp has no file of {recording}"
        elif source.endswith("|"):
            fault = f"its sound is made by a command, {source!r}: write it to a file first"
        elif transcribed and name not in texts:
            fault = "no text"
        path = Path(source) if fault else _found(source, folder)
        yield Utterance(name, path, texts.get(name, ""), speakers.get(name, ""), duration, begin, fault=fault)
    heard = {name for name, _ in segments or whole}
    for name in texts:
        if name not in heard:
            yield Utterance(name, folder, "", fault=f"{'segments' if segments else 'wav.scp'} has no audio of it")


def _rows(path: Path, needed: bool = True) -> list[tuple[str, str]]:
    """The first word of each line and the rest; empty if the file is missing and not `needed`."""
    if not needed and not path.is_file():
        return []
    rows = (line.strip().partition(" ") for line in (line.replace("\t", " ") for line in read_lines(path)))
    return [(name, rest.strip()) for name, _, rest in rows if name]


def _found(source: str, folder: Path) -> Path:
    above = (parent / source for parent in folder.absolute().parents)
    return next((path for path in (Path(source), *above) if path.is_file()), Path(source))
