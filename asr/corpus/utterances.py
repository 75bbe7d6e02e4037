"""One utterance is one Lhotse cut: making it from a source, checking it, reading its audio, its matrix or its text.

Audio inside an uncompressed tar is read in place, at `tar_offset` and `tar_size` in the cut's custom fields. The tar
may be a URL; `shard` names one whose utterances are kept together in training. Of a file of several channels the mean
is read, or the channel that the custom field `of_channels` names. A feature matrix has no recording; its path is the
custom field `matrix`, next to its `width`. An input text, which is to be written as another, has none either: it is
the custom field `source`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from fsspec.core import url_to_fs
from lhotse import AudioSource, CutSet, MonoCut, Recording, SupervisionSegment
from lhotse.supervision import AlignmentItem
from lhotse.utils import fastcopy

from asr.audio.matrices import MATRIX_SUFFIXES, read_matrix, read_shape
from asr.audio.reading import SAMPLE_RATE, STEPS_PER_SECOND, AudioError, printable, read_audio, read_duration
from asr.files import replacing

PLACE = ("tar_offset", "tar_size", "shard")  # of audio within another file: keys of a cut's `custom`
CHANNEL = "of_channels"  # the key of a channel of the file
ROUNDING = 0.1  # seconds at the end of a file that its header may not count
TRIES, PATIENCE = 3, 1.0  # to read a URL, and the seconds in between

logger = logging.getLogger(__name__)


@dataclass
class Utterance:
    """What every corpus reader yields: a file (or a part of a tar, or a text), its transcript, and any metadata."""

    id: str
    path: Path
    text: str
    speaker: str = ""
    duration: float | None = None  # seconds; None: from the file's header
    offset: float = 0.0  # seconds of the file before the utterance
    channel: int | None = None  # of the file's, from 0 on; None: the mean of all
    tar_offset: int | None = None
    tar_size: int | None = None
    source: str | None = None  # a text in place of audio; `path` names its manifest
    fault: str | None = None  # why the utterance cannot be used


NAMED = 10  # utterances left out that are named; the others are only counted


class Skipped:
    """Counts what is left out; reports the first few by name with the reason, and the total at the end."""

    def __init__(self, what: str):
        self.what, self.count, self.total = what, 0, 0

    def add(self, name: str, reason: str) -> None:
        self.count += 1
        if self.count <= NAMED:
            logger.warning("%s: left out %s: %s", self.what, printable(name), printable(reason))

    def report(self) -> None:
        if self.count:
            logger.warning("%s: %d of %d utterances left out", self.what, self.count, self.total)


def make_cuts(utterances: Iterable[Utterance], what: str, skipped: Skipped | None = None) -> CutSet:
    """A CutSet of the utterances whose files exist and have audio; the rest are reported by name and counted, in
    `skipped` if the caller passes one, or else with the total at the end.

    `what` names the corpus in the report. Raises ValueError if nothing is left."""
    told, cuts, seen = skipped or Skipped(what), [], set()
    duration_of = cache(read_duration)  # many utterances may be parts of one file
    for utterance in utterances:
        told.total += 1
        try:
            if utterance.fault:
                raise AudioError(utterance.fault)
            if utterance.id in seen:
                raise AudioError("another one has the same name (an `id` tells them apart)")
            cuts.append(_make_cut(utterance, duration_of))
            seen.add(utterance.id)
        except AudioError as error:
            told.add(utterance.id, str(error))
    if skipped is None:
        told.report()
    if not cuts:
        raise ValueError(f"{what}: no utterance that can be read")
    return CutSet.from_cuts(cuts)


def write_cuts(cuts: CutSet, path: Path) -> CutSet:
    """Writes cuts (`.jsonl.gz`) completely or not at all, into a folder that is created if missing, and returns those
    written; those that are not `writable` are reported by name and left out. Raises ValueError if there are none."""
    cuts = CutSet.from_cuts(writable(cuts, str(path)))
    if not len(cuts):
        raise ValueError(f"{path}: there is no utterance to write")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as unfinished:
        cuts.to_file(unfinished)
    return cuts


def writable(cuts: Iterable[MonoCut], what: str) -> list[MonoCut]:
    """The cuts that can be written as JSON; those with a name or a transcript that is not UTF-8 are reported."""

    def unwritable(cut: MonoCut) -> str | None:
        custom = cut.custom or {}
        source = cut.recording.sources[0].source if cut.recording else custom.get("matrix", custom.get("source", ""))
        said = [f"{supervision.text} {supervision.speaker}" for supervision in cut.supervisions]
        try:
            " ".join([cut.id, source, *said]).encode()
        except UnicodeEncodeError:
            return "its name, its file's, its speaker's or its transcript is not UTF-8"
        return None

    return kept(cuts, what, unwritable)


def nameable(cuts: Iterable[MonoCut], what: str) -> list[MonoCut]:
    """The cuts that can be written, and whose names files can have; the others are reported."""
    null = "its name has a null character, as no file's may"
    return kept(writable(cuts, what), what, lambda cut: null if "\0" in cut.id else None)


def of_file(cut: MonoCut, source: AudioSource, count: int) -> MonoCut:
    """The cut as the whole of a mono file of its own, of `count` samples at 16 kHz."""
    duration = count / SAMPLE_RATE
    return fastcopy(
        cut,
        start=0.0,
        duration=duration,
        channel=0,
        recording=Recording(cut.id, [source], SAMPLE_RATE, count, duration),
        features=None,
        supervisions=[fastcopy(each, channel=0, recording_id=cut.id) for each in cut.supervisions],
        custom={key: value for key, value in (cut.custom or {}).items() if key not in (*PLACE, CHANNEL)} or None,
    )


def kept(cuts: Iterable[MonoCut], what: str, unfit: Callable[[MonoCut], str | None]) -> list[MonoCut]:
    """The cuts that `unfit` gives no reason to leave out; the others are reported by name, as part of `what`."""
    skipped, fit = Skipped(what), []
    for cut in cuts:
        skipped.total += 1
        if reason := unfit(cut):
            skipped.add(cut.id, reason)
        else:
            fit.append(cut)
    skipped.report()
    return fit


def input_kind(cut: MonoCut) -> str:
    """The kind of input: sound, matrix or text."""
    custom = {} if cut.recording else cut.custom or {}  # next to audio, they may mean anything
    return "matrix" if "matrix" in custom else "text" if "source" in custom else "sound"


def word_times(cut: MonoCut) -> list[AlignmentItem]:
    """When each word of a cut is said. Raises ValueError for a cut without audio, or without the times of its words."""
    if (kind := input_kind(cut)) != "sound":
        raise ValueError(f"{cut.id}: only audio can be cut, and this is {kind}")
    if not (words := (cut.supervisions[0].alignment or {}).get("word")):
        raise ValueError(f"{cut.id}: the times of its words are unknown (asr.align finds them)")
    return words


def read_cut(cut: MonoCut) -> np.ndarray | str:
    """The samples `(N,)` of a cut at 16 kHz, its matrix `(T, d)`, or its text. Raises AudioError naming the file."""
    custom, kind = cut.custom or {}, input_kind(cut)
    if kind == "text":
        return custom["source"]
    if kind == "matrix":
        return read_matrix(custom["matrix"])
    path = cut.recording.sources[0].source
    source, name = path, None
    if "tar_offset" in custom:
        source, name = _tar_member(path, custom["tar_offset"], custom["tar_size"]), f"{path}:{cut.id}"
    several = cut.recording.sources[0].channels  # each cut has one of them
    if len(several) > 1 and cut.channel not in several:
        raise AudioError(f"{path}: it has no channel {cut.channel}")
    channel = several.index(cut.channel) if len(several) > 1 else custom.get(CHANNEL)
    samples = read_audio(source, name, cut.start, cut.end + ROUNDING, channel)
    if cut.start or len(samples) >= round((cut.duration + ROUNDING) * SAMPLE_RATE):
        samples = samples[: round(cut.duration * SAMPLE_RATE)]
    if not len(samples):
        raise AudioError(f"{path}: no sound in it from {cut.start:.2f} to {cut.end:.2f} s")
    _check_whole(path, len(samples) / SAMPLE_RATE, cut.duration)
    return samples


def iterate(cuts: Iterable[MonoCut], skipped: Skipped | None = None) -> Iterator[tuple[MonoCut, np.ndarray | str]]:
    """Every cut with the result of `read_cut`; what cannot be read is left out and reported by name, through `skipped`
    if the caller passes one, or else with the total at the end."""
    told = skipped or Skipped("reading")
    for cut in cuts:
        told.total += 1
        try:
            yield cut, read_cut(cut)
        except AudioError as error:
            told.add(cut.id, str(error))
    if skipped is None:
        told.report()


def _make_cut(utterance: Utterance, duration_of: Callable[[Path], float]) -> MonoCut:
    path, custom = utterance.path, {}
    if utterance.source is not None:
        custom["source"] = utterance.source
        recording, duration = None, len(utterance.source) / STEPS_PER_SECOND
        if not utterance.source.strip():
            raise AudioError(f"{path}: an empty source")
    elif path.suffix.lower() in MATRIX_SUFFIXES:
        if utterance.offset or utterance.channel is not None:
            raise AudioError(f"{path}: a matrix is one utterance, and has no offset and no channels")
        frames, width = read_shape(path)
        custom.update(matrix=str(path.absolute()), width=width)
        recording, duration = None, frames / STEPS_PER_SECOND
    else:
        if utterance.tar_offset is None:
            header = duration_of(path)
        else:
            custom.update(tar_offset=utterance.tar_offset, tar_size=utterance.tar_size)
            member = _tar_member(path, utterance.tar_offset, utterance.tar_size)
            header = read_duration(member, f"{path}:{utterance.id}")
        duration = utterance.duration or header - utterance.offset
        if header <= 0:
            raise AudioError(f"{path}: no sound in it")
        if header <= utterance.offset:
            raise AudioError(f"{path}: it is {header:.2f} s long, and the utterance begins at {utterance.offset:.2f} s")
        if utterance.channel is not None:
            custom[CHANNEL] = utterance.channel
        _check_whole(path, header - utterance.offset, duration)
        recording = Recording(
            id=utterance.id,
            sources=[AudioSource(type="file", channels=[0], source=str(path.absolute()))],
            sampling_rate=SAMPLE_RATE,
            num_samples=round((utterance.offset + duration) * SAMPLE_RATE),
            duration=utterance.offset + duration,
        )
    supervision = SupervisionSegment(
        id=utterance.id,
        recording_id=utterance.id,
        start=0,
        duration=duration,
        text=utterance.text,
        speaker=utterance.speaker or None,
    )
    return MonoCut(
        id=utterance.id,
        start=utterance.offset,
        duration=duration,
        channel=0,
        supervisions=[supervision],
        recording=recording,
        custom=custom or None,
    )


def _check_whole(path: str | Path, present: float, duration: float) -> None:
    """Raises AudioError if clearly less audio is present than the `duration` that its transcript covers."""
    if duration - present > max(0.1, 0.05 * duration):
        raise AudioError(f"{path}: it has {present:.2f} s of the {duration:.2f} s that it should have")


def fetch(url: str, first: int | None = None, end: int | None = None) -> bytes:
    """The bytes of a URL, or those from `first` up to `end` (exclusive). Raises AudioError if there is no such file, if
    reading fails `TRIES` times, or if the server sends more than was asked for."""
    for left in reversed(range(TRIES)):
        try:
            files, name = url_to_fs(url)
            data = files.cat_file(name, start=first, end=end)
            break
        except Exception as error:  # each kind of storage has its own errors
            if not left or isinstance(error, FileNotFoundError | ImportError):
                reason = "no such file" if isinstance(error, FileNotFoundError) else error or type(error).__name__
                raise AudioError(f"{url}: {reason}") from None
            time.sleep(PATIENCE)
    if end is not None and len(data) > end - first:
        raise AudioError(f"{url}: the server does not support range requests")
    return data


def _tar_member(path: str | Path, offset: int, size: int) -> bytes:
    if "://" in str(path):
        data = fetch(str(path), offset, offset + size)
    else:
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                data = file.read(size)
        except OSError as error:
            raise AudioError(f"{path}: {error.strerror}") from None
    if len(data) < size:
        raise AudioError(f"{path}: the tar ends in the middle of a file")
    return data
