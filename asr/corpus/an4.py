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
    """The utterances of one list, `an4/etc/an4_train.fileids` or `an4/etc/an4_test.fileids`; one that has no transcript
    has a fault."""
    transcription = fileids.with_suffix(".transcription")
    texts = {match["id"]: match["text"] for match in map(_LINE.match, read_lines(transcription)) if match}
    for line in " ".join(read_lines(fileids)).split():
        stem = fileids.parent.parent / "wav" / line
        name = stem.name
        paths = [stem.with_name(name + suffix) for suffix in SUFFIXES]
        path = next(filter(Path.is_file, paths), paths[0])
        fault = None if name in texts else f"{transcription.name} has no line `TEXT ({name})`"
        yield Utterance(name, path, texts.get(name, ""), speaker=stem.parent.name, fault=fault)
