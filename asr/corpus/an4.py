"""CMU's AN4 as unpacked: `etc/an4_train.fileids` and `etc/an4_train.transcription` (lines in the same order,
`<s> TEXT </s> (id)` or `TEXT (id)`), audio under `wav/` as NIST sphere, wav or flac. `an4_test` likewise."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from asr.audio.reading import read_lines
from asr.corpus.utterances import Utterance

SUFFIXES = (".sph", ".wav", ".flac")
_LINE = re.compile(r"^(?:<s>)?\s*(?P<text>.*?)\s*(?:</s>)?\s*\((?P<id>[^()]+)\)\s*$")


def read_an4(fileids: Path) -> Iterator[Utterance]:
    """The utterances of one list, `an4/etc/an4_train.fileids` or `an4/etc/an4_test.fileids`."""
    transcription = fileids.with_suffix(".transcription")
    if not transcription.is_file():
        raise ValueError(f"{fileids}: no {transcription.name} beside it")
    texts = {}
    for number, line in enumerate(read_lines(transcription), 1):
        if not line.strip():
            continue
        match = _LINE.match(line)
        if not match:
            raise ValueError(f"{transcription}, line {number}: not `TEXT (id)`")
        texts[match["id"]] = match["text"]
    for line in " ".join(read_lines(fileids)).split():
        stem = fileids.parent.parent / "wav" / line
        name = stem.name
        if name not in texts:
            raise ValueError(f"{transcription}: no transcript of {name}")
        audio = next((stem.with_name(name + s) for s in SUFFIXES if stem.with_name(name + s).is_file()), None)
        yield Utterance(name, audio or stem.with_name(name + SUFFIXES[0]), texts[name], speaker=stem.parent.name)
