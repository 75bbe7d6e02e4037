"""LibriSpeech as it is unpacked (Panayotov et al. 2015): `speaker/chapter/speaker-chapter-utterance.flac` beside a
`speaker-chapter.trans.txt` with a line `id TRANSCRIPT` for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asr.corpus.utterances import Utterance


def is_librispeech(folder: Path) -> bool:
    return next(folder.rglob("*.trans.txt"), None) is not None


def read_librispeech(folder: Path) -> Iterator[Utterance]:
    """The utterances of a part (`LibriSpeech/train-clean-100`), or of all parts under `folder`."""
    for transcripts in sorted(folder.rglob("*.trans.txt")):
        for line in transcripts.read_text(encoding="utf-8").splitlines():
            name, _, text = line.partition(" ")
            if name:
                yield Utterance(name, transcripts.parent / f"{name}.flac", text, speaker=name.split("-")[0])
