"""A corpus as shards: large training runs have a few tars open at a time instead of jumping among millions of files.

A folder has its shards in `shar` (Lhotse Shar: `cuts.000000.jsonl.gz` with `recording.000000.tar` and so on) and next
to it `index.jsonl.gz`, which says where in the shards each utterance lies. With an index, the folder may also be a URL
(read by fsspec). Shards written by Lhotse have no index; their tars are scanned.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import shutil
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import soundfile
from lhotse import AudioSource, CutSet, MonoCut
from lhotse.serialization import deserialize_item
from lhotse.shar import JsonlShardWriter, TarWriter
from lhotse.utils import fastcopy

from asr.audio.interrupts import undisturbed
from asr.audio.reading import SAMPLE_RATE, within_range
from asr.corpus.utterances import PLACE, fetch, input_kind, iterate, nameable, of_file
from asr.files import replacing

INDEX, SHARDS = "index.jsonl.gz", "shar"


def write_shards(cuts: Iterable[MonoCut], folder: Path, size: int) -> CutSet:
    """Writes the audio (16-bit flac at 16 kHz) and the metadata of the cuts, `size` utterances per shard, and returns
    the cuts of the shards; what cannot be read is reported by name and left out.

    The shards appear once all are written. Raises ValueError if the folder already has some, a cut is not audio, or
    none can be read."""
    if (folder / SHARDS).exists():
        raise ValueError(f"{folder / SHARDS} is there already")
    cuts = nameable(cuts, str(folder))
    for cut in cuts:
        if input_kind(cut) != "sound":
            raise ValueError(f"{cut.id}: shards hold sound, and this is {input_kind(cut)}")
    inside = folder / f"{SHARDS}.new"
    shutil.rmtree(inside, ignore_errors=True)
    inside.mkdir(parents=True)
    tars = TarWriter(f"{inside}/recording.%06d.tar", size)
    metadata = JsonlShardWriter(f"{inside}/cuts.%06d.jsonl.gz", size)
    with tars, metadata:
        for cut, samples in iterate(cuts):
            flac, copy = io.BytesIO(), of_file(cut, AudioSource("shar", [0], ""), len(samples))
            with undisturbed():
                soundfile.write(flac, within_range(samples), SAMPLE_RATE, format="FLAC")
            tars.write(f"{cut.id}.flac", flac)
            tars.write(f"{cut.id}.json", io.BytesIO(json.dumps(copy.recording.to_dict()).encode()), count=False)
            metadata.write(copy)
    if not tars.num_items_total:
        raise ValueError(f"{folder}: no utterance could be read")
    with replacing(folder / INDEX) as unfinished:
        CutSet.from_cuts(_index(inside, f"{SHARDS}/")).to_file(unfinished)
        inside.rename(folder / SHARDS)
    return read_shards(folder)


def is_shards(path: str | Path) -> bool:
    return "://" in str(path) or (Path(path) / INDEX).is_file() or any(Path(path).glob("recording.*.tar"))


def read_shards(folder: str | Path) -> CutSet:
    """The cuts of a folder of shards, or of its URL. Raises ValueError if they cannot be read."""
    remote = "://" in str(folder)
    folder = str(folder).rstrip("/") if remote else str(Path(folder).absolute())
    if not remote and not (Path(folder) / INDEX).is_file():
        return CutSet.from_cuts(_index(Path(folder), f"{folder}/"))
    path = f"{folder}/{INDEX}"
    with blaming(path):
        packed = fetch(path) if remote else Path(path).read_bytes()
        cuts = [deserialize_item(json.loads(line)) for line in gzip.decompress(packed).splitlines()]
        for cut in cuts:
            source = cut.recording.sources[0]
            source.source = cut.custom["shard"] = f"{folder}/{source.source}"
        if remote and cuts:
            offset, _, shard = (cuts[0].custom[name] for name in PLACE)
            fetch(shard, offset, offset + 1)  # a server may only support whole files
        return CutSet.from_cuts(cuts)


@contextlib.contextmanager
def blaming(path: str | Path) -> Iterator[None]:
    """Turns any error that a damaged file leads to into a ValueError that names the file."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{path}: cannot be read ({error or type(error).__name__})") from None


def _index(folder: Path, prefix: str) -> Iterator[MonoCut]:
    """The cuts of all shards in a folder, with their tars (`prefix` and name) and where in them their audio lies."""
    files = *folder.glob("recording.*.tar"), *folder.glob("cuts.[0-9]*.jsonl.gz")  # a shard has both
    for number in sorted({file.name.split(".")[1] for file in files}):
        path, metadata = folder / f"recording.{number}.tar", folder / f"cuts.{number}.jsonl.gz"
        with blaming(path), tarfile.open(path, "r:") as tar:
            without = ".json", ".nodata", ".nometa"  # what Lhotse writes next to the audio, or in its place
            sounds = {m.name.rpartition(".")[0]: m for m in tar if not m.name.endswith(without)}
        with blaming(metadata):
            cuts = list(CutSet.from_file(metadata))
        for cut in cuts:
            if cut.id not in sounds:
                raise ValueError(f"{path}: the sound of {cut.id} is not in it")
            name = prefix + path.name
            place = dict(zip(PLACE, (sounds[cut.id].offset_data, sounds[cut.id].size, name), strict=True))
            recording = fastcopy(cut.recording, sources=[AudioSource("file", [0], name)])
            yield fastcopy(cut, start=0.0, recording=recording, custom=(cut.custom or {}) | place)
