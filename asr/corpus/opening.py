"""Opening a corpus, whose form is recognised from its path."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
from lhotse.augmentation import Resample

from asr.corpus.an4 import read_an4
from asr.corpus.folder import read_folder
from asr.corpus.kaldi import is_kaldi, read_kaldi
from asr.corpus.librispeech import is_librispeech, read_librispeech
from asr.corpus.manifest import read_manifest, read_tar
from asr.corpus.shards import blaming, is_shards, read_shards
from asr.corpus.utterances import Skipped, Utterance, input_kind, make_cuts

FORMS = (
    "cuts (.jsonl.gz), shards (a folder or a URL), a JSONL manifest (.jsonl, .json), a tar with manifest.jsonl, an AN4 "
    "list (.fileids), a LibriSpeech folder, a data directory of Kaldi or ESPnet (wav.scp), or a folder of audio with "
    ".txt beside each file"
)


def open_corpus(
    path: str | Path | Sequence[str | Path], transcribed: bool = True, skipped: Skipped | None = None
) -> CutSet:
    """Lhotse cuts of a corpus, or of several in turn, in any of `FORMS`; unless it has to be `transcribed`, manifests
    may lack `text` and folders `.txt`. A corpus that is named twice counts twice.

    Files that are missing, empty or damaged are reported by name and left out, and counted in `skipped` if one is
    passed. Raises ValueError if it is no corpus."""
    if not isinstance(path, str | Path):
        if not path:
            raise ValueError("no corpus was given")
        return together([open_corpus(one, transcribed, skipped) for one in path])
    if is_shards(path):
        return _single(read_shards(path), path, transcribed)
    path = Path(path)
    if path.name.endswith(".jsonl.gz"):
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        with blaming(path):
            with gzip.open(path, "rt", encoding="utf-8") as file:
                first = file.readline()
            if not first.strip():
                raise ValueError("there are no cuts in it")
            if "audio_filepath" in json.loads(first):
                raise ValueError("these are not cuts: a manifest is .jsonl, not compressed")
            cuts = CutSet.from_file(path).to_eager()
        return _single(cuts, path, transcribed)
    return make_cuts(_utterances(path, transcribed), str(path), skipped)


def together(corpora: list[CutSet]) -> CutSet:
    """All cuts of several corpora. If two have the same name, the second becomes NAME@2."""
    everything = [cut for cuts in corpora for cut in cuts]
    taken, counts = {cut.id for cut in everything}, Counter()
    for cut in everything:
        name = cut.id
        counts[name] += 1
        if counts[name] > 1:
            cut.id = next(new for n in count(counts[name]) if (new := f"{name}@{n}") not in taken)
            taken.add(cut.id)
    return CutSet.from_cuts(everything)


def _single(cuts: CutSet, path: str | Path, transcribed: bool) -> CutSet:
    """Returns cuts made elsewhere, after a check that each is one utterance."""
    for cut in cuts:
        if not transcribed and isinstance(cut, MonoCut) and not cut.supervisions:
            cut.supervisions = [SupervisionSegment(cut.id, cut.recording_id, 0, cut.duration, text="")]
        if not isinstance(cut, MonoCut) or len(cut.supervisions) != 1:
            raise ValueError(f"{path}: {cut.id} is not one channel with one supervision (lhotse: trim_to_supervisions)")
        if input_kind(cut) == "sound" and not _is_a_file(cut.recording):
            raise ValueError(f"{path}: {cut.id} is more than a part of a file (lhotse: save_audios)")
    return cuts


def _is_a_file(recording: Recording | None) -> bool:
    """Whether a recording is just the content of a file, at any sample rate: not of several files, not made faster or
    louder."""
    if recording is None or len(recording.sources) != 1:
        return False
    source = recording.sources[0]
    only_resampled = all(isinstance(transform, Resample) for transform in recording.transforms or ())
    return source.type == "file" and only_resampled


def _utterances(path: Path, transcribed: bool) -> Iterator[Utterance]:
    if path.is_dir():
        if is_kaldi(path):
            return read_kaldi(path, transcribed)
        return read_librispeech(path) if is_librispeech(path) else read_folder(path, transcribed)
    if not path.is_file():
        raise ValueError(f"{path}: no such file or folder")
    if path.suffix == ".fileids":
        return read_an4(path)
    readers = {".jsonl": read_manifest, ".json": read_manifest, ".tar": read_tar}
    if path.suffix not in readers:
        raise ValueError(f"{path}: not a corpus; one is {FORMS}")
    return readers[path.suffix](path, transcribed)
