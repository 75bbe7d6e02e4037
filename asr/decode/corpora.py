"""Transcription of a whole corpus by one or several processes, and its alignment."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch.distributed
from lhotse import CutSet, MonoCut
from lhotse.supervision import AlignmentItem

from asr.audio.reading import STEPS_PER_SECOND
from asr.corpus import Skipped, input_kind, iterate
from asr.decode.recognizer import Recognizer
from asr.decode.recordings import misfit
from asr.decode.transcript import Transcript
from asr.text.normalizer import Normalizer

WAITING = timedelta(days=7)  # of finished processes for the others: utterances are dealt out by number, not length


class Transcribed(NamedTuple):
    """The references and hypotheses of a corpus."""

    cuts: list[MonoCut]
    references: list[str]  # normalised
    hypotheses: list[str]  # normalised
    transcripts: list[Transcript]
    seconds: float  # that decoding took


def seconds_of(recognizer: Recognizer, cut: MonoCut) -> float:
    """The length of a cut as the recogniser counts it; in its cut, a matrix of T frames lasts T / 100 s for any hop."""
    return cut.duration * STEPS_PER_SECOND / recognizer.rate if recognizer.takes == "matrix" else cut.duration


def iterate_for(recognizer: Recognizer, cuts: Iterable[MonoCut]) -> Iterator[tuple[MonoCut, np.ndarray | str]]:
    """Iterates like `asr.corpus.iterate`. Raises ValueError for a cut of another kind than the model accepts."""
    for cut, sound in iterate(cuts):
        if input_kind(cut) != recognizer.takes:
            raise ValueError(f"{cut.id}: this is {input_kind(cut)}, and the model takes {recognizer.takes}")
        yield cut, sound


def transcribe_cuts(
    recognizer: Recognizer,
    cuts: CutSet,
    progress: Callable[[float], None] | None = None,
    normalize: Normalizer | None = None,
) -> Transcribed:
    """Transcribes the cuts; those that cannot be read, are too long for the model or matrices of another width than its
    own are reported by name and left out. `progress` is told the seconds done; `normalize` (by default the model's) is
    applied to references and hypotheses alike.

    Raises ValueError if no cut with a transcript could be read, or for a cut of another kind than the model accepts."""
    normalize = normalize or recognizer.model.normalize
    _check_transcripts(cuts, normalize)
    return _some(_transcribe(recognizer, cuts, progress, normalize))


def _check_transcripts(cuts: CutSet, normalize: Normalizer) -> None:
    if not any(normalize(cut.supervisions[0].text or "") for cut in cuts):
        raise ValueError("no utterance has a transcript to compare with")


def _some(done: Transcribed) -> Transcribed:
    if not any(done.references):
        raise ValueError("no utterance with a transcript could be read")
    return done


def _transcribe(
    recognizer: Recognizer, cuts: CutSet, progress: Callable[[float], None] | None, normalize: Normalizer
) -> Transcribed:
    read = []

    def sounds():
        for cut, sound in iterate_for(recognizer, cuts):
            read.append(cut)
            yield sound

    started = time.monotonic()
    transcripts = list(recognizer.transcribe_all(sounds(), progress))
    took = time.monotonic() - started
    skipped, heard = Skipped("decoding"), Transcribed([], [], [], [], took)
    skipped.total = len(read)
    for cut, transcript in zip(read, transcripts, strict=True):
        if transcript.error:  # names the input as an array, not as the cut
            skipped.add(cut.id, transcript.error.removeprefix(f"{transcript.name}: "))
            continue
        heard.cuts.append(cut)
        heard.references.append(normalize(cut.supervisions[0].text or ""))
        heard.hypotheses.append(normalize(transcript.text))
        heard.transcripts.append(transcript)
    skipped.report()
    return heard


def transcribe_together(
    recognizer: Recognizer,
    cuts: CutSet,
    progress: Callable[[float], None] | None = None,
    normalize: Normalizer | None = None,
) -> Transcribed | None:
    """`transcribe_cuts`, shared by the processes that torchrun (or another launcher that sets WORLD_SIZE and RANK) has
    started. Process 0 returns all of it, in order, the others None. A single process does everything itself."""
    rank, world = rank_and_world()
    if world == 1:
        return transcribe_cuts(recognizer, cuts, progress, normalize)
    normalize = normalize or recognizer.model.normalize
    _check_transcripts(cuts, normalize)
    place = {cut.id: i for i, cut in enumerate(cuts)}
    mine = _transcribe(recognizer, CutSet.from_cuts(list(cuts)[rank::world]), progress, normalize)
    torch.distributed.init_process_group("gloo", timeout=WAITING)
    everything: list | None = [None] * world if rank == 0 else None
    torch.distributed.gather_object(mine, everything)
    torch.distributed.destroy_process_group()
    if everything is None:
        return None
    *columns, seconds = zip(*everything, strict=True)
    cuts, *others = (list(chain.from_iterable(column)) for column in columns)
    order = sorted(range(len(cuts)), key=lambda i: place[cuts[i].id])
    in_order = ([column[i] for i in order] for column in (cuts, *others))
    return _some(Transcribed(*in_order, max(seconds)))


def rank_and_world() -> tuple[int, int]:
    """The rank of this process, and the number of processes."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def align_cuts(recognizer: Recognizer, cuts: CutSet, progress: Callable[[float], None] | None = None) -> CutSet:
    """The cuts with the times of their words, as the model's normaliser writes them. Cuts are reported by name and left
    out if they cannot be read, are silent, have no transcript, are too long for the model or too short for their
    transcript, or are matrices of another width than the model's. `progress` is told the seconds done. Times are
    relative to the cut.

    Raises ValueError if the model does not accept what was read or has no CTC, or if nothing could be aligned."""
    skipped, aligned = Skipped("aligning"), set()
    skipped.total = len(cuts)
    for batch in _of_a_length(recognizer, cuts, skipped):
        texts = [recognizer.model.normalize(cut.supervisions[0].text or "") for cut, _ in batch]
        for (cut, _), words in zip(batch, recognizer.align([sound for _, sound in batch], texts), strict=True):
            if not words:
                skipped.add(cut.id, "silent, or too short for its transcript" if words is None else "no transcript")
                continue
            scale = cut.duration / seconds_of(recognizer, cut)
            items = [AlignmentItem(word.text, scale * word.start, scale * (word.end - word.start)) for word in words]
            cut.supervisions[0].alignment = {"word": items}
            aligned.add(cut.id)
        if progress:
            progress(sum(seconds_of(recognizer, cut) for cut, _ in batch))
    skipped.report()
    if not aligned:
        raise ValueError("no utterance could be aligned")
    return CutSet.from_cuts(cut for cut in cuts if cut.id in aligned)


def _of_a_length(recognizer: Recognizer, cuts: CutSet, skipped: Skipped) -> Iterator[list[tuple[MonoCut, np.ndarray]]]:
    """Batches of cuts of about the same length, with their inputs; without those that do not fit the model."""
    batch: list[tuple[MonoCut, np.ndarray]] = []
    width = recognizer.model.front_end.config.dim if recognizer.takes == "matrix" else None
    for cut, sound in iterate_for(recognizer, sorted(cuts, key=lambda cut: cut.duration)):
        if reason := recognizer.too_long(len(sound)) or (width and misfit(sound, width)):
            skipped.add(cut.id, reason)
            continue
        if batch and (len(batch) + 1) * seconds_of(recognizer, cut) > recognizer.batch_seconds:
            yield batch
            batch = []
        batch.append((cut, sound))
    if batch:
        yield batch
