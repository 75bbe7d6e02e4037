"""LibriSpeech (Panayotov et al. 2015): downloading it, and reading it as unpacked.

`speaker/chapter/speaker-chapter-utterance.flac` lies next to a `speaker-chapter.trans.txt` with a line `id TRANSCRIPT`
for each utterance."""

from __future__ import annotations

import gzip
import hashlib
import logging
import shutil
import tarfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

from lhotse.utils import resumable_download, safe_extract

from asr.audio.reading import files_under, read_lines
from asr.corpus.utterances import Utterance

logger = logging.getLogger(__name__)

OPENSLR = "https://www.openslr.org/resources"
FULL = ("dev-clean", "dev-other", "test-clean", "test-other", "train-clean-100", "train-clean-360", "train-other-500")
MINI = ("dev-clean-2", "train-clean-5")
NUMBERS = {**dict.fromkeys(FULL, 12), **dict.fromkeys(MINI, 31)}  # of the resources on OpenSLR


def is_librispeech(folder: Path) -> bool:
    return next(_transcripts(folder), None) is not None


def read_librispeech(folder: Path) -> Iterator[Utterance]:
    """The utterances of a part (`LibriSpeech/train-clean-100`), or of all parts under `folder`."""
    for transcripts in sorted(_transcripts(folder)):
        for line in read_lines(transcripts):
            name, _, text = line.partition(" ")
            if name:
                yield Utterance(name, transcripts.parent / f"{name}.flac", text, speaker=name.split("-")[0])


def _transcripts(folder: Path) -> Iterator[Path]:
    return (path for path in files_under(folder) if path.name.endswith(".trans.txt"))


def download_librispeech(part: str, folder: Path, url: str = OPENSLR) -> Path:
    """Downloads a part (`train-clean-100`, `dev-clean-2`, ...) and unpacks it to `folder / LibriSpeech / part`.

    What is already there is left alone: the unpacked folder, and a complete archive, which is unpacked and kept; an
    interrupted download continues where it stopped. The archive's MD5 sum is compared with the one published next to
    it. Raises ValueError for an unknown part, a server that cannot be reached, or an archive that differs from the
    published one or cannot be unpacked (it is deleted)."""
    if part not in NUMBERS:
        raise ValueError(f"{part} is no part of LibriSpeech: {', '.join(NUMBERS)}")
    place = folder / "LibriSpeech" / part
    if place.is_dir():
        return place
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / f"{part}.tar.gz"
    source = f"{url}/{NUMBERS[part]}"
    try:
        published = _published_sum(f"{source}/md5sum.txt", archive.name)
        if published:
            fetched = not (archive.is_file() and _md5(archive) == published)
        else:  # its size has to do
            fetched = not (archive.is_file() and archive.stat().st_size == _size(f"{source}/{archive.name}"))
        if fetched:
            resumable_download(f"{source}/{archive.name}", archive)
            if archive.stat().st_size < _size(f"{source}/{archive.name}"):
                raise OSError("the server ended it early")
    except (OSError, HTTPException) as error:  # from the network or the disk
        raise ValueError(f"{source}/{archive.name}: {error}; the same command continues where it stopped") from None
    if fetched and published and _md5(archive) != published:
        archive.unlink()
        raise ValueError(f"{archive}: its MD5 sum is not the published one; deleted, run the same command again")
    try:
        _unpack(archive, folder)
    except (tarfile.TarError, zlib.error, EOFError, gzip.BadGzipFile) as error:
        archive.unlink()
        raise ValueError(f"{archive}: {error}; deleted, run the same command again") from None
    if fetched:
        archive.unlink()
    return place


def _unpack(archive: Path, folder: Path) -> None:
    """Unpacks what `folder` does not have yet: a part is there completely or not at all."""
    unpacked = folder / f"{archive.name}.unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    with tarfile.open(archive) as tar:
        safe_extract(tar, path=unpacked)
    (folder / "LibriSpeech").mkdir(exist_ok=True)
    for item in (unpacked / "LibriSpeech").iterdir():
        if not (folder / "LibriSpeech" / item.name).exists():
            item.rename(folder / "LibriSpeech" / item.name)
    shutil.rmtree(unpacked)


def _published_sum(url: str, name: str) -> str | None:
    try:
        with urllib.request.urlopen(url) as response:
            lines = response.read().decode().splitlines()
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise
        lines = []
    sums = {words[1].lstrip("*./"): words[0] for line in lines if len(words := line.split()) == 2}
    if name not in sums:
        logger.warning("%s: no MD5 sum of %s is published there; it is not checked", url, name)
    return sums.get(name)


def _size(url: str) -> int:
    """The size in bytes; 0 if the server does not say."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as response:
            return int(response.headers.get("Content-Length", 0))
    except urllib.error.HTTPError:
        return 0


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.md5(usedforsecurity=False)
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
