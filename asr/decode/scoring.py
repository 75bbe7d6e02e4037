"""A corpus transcribed, by one process or several, and its word and character error rates (jiwer aligns)."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from operator import itemgetter

import jiwer
import numpy as np
import torch.distributed
from lhotse import CutSet, MonoCut

from asr.corpus import input_kind, iterate
from asr.decode.recognizer import Recognizer
from asr.decode.transcript import Transcript

RESAMPLINGS = 1000
WAITING = timedelta(days=7)  # of a process that is done for the others: utterances are dealt out by number, not length


@dataclass(frozen=True)
class Errors:
    """Edits from the references to the hypotheses, summed over utterances."""

    substitutions: int
    deletions: int
    insertions: int
    total: int  # words or characters of the references

    @property
    def edits(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Errors in percent of the references' words or characters."""
        return 100 * self.edits / max(1, self.total)


def word_errors(references: Sequence[str], hypotheses: Sequence[str]) -> Errors:
    """WER's counts over pairs of texts that are normalised alike; pairs whose reference is empty do not count."""
    return _errors(jiwer.process_words, references, hypotheses)


def character_errors(references: Sequence[str], hypotheses: Sequence[str]) -> Errors:
    """CER's counts, spaces included."""
    return _errors(jiwer.process_characters, references, hypotheses)


def wer_interval(references: Sequence[str], hypotheses: Sequence[str]) -> tuple[float, float]:
    """95 % confidence interval of the WER in percent, by bootstrap over utterances (Bisani & Ney 2004)."""
    each = [word_errors([said], [heard]) for said, heard in zip(references, hypotheses, strict=True) if said]
    if not each:
        return 0.0, 0.0
    edits, words = np.array([(errors.edits, errors.total) for errors in each]).T
    rng = np.random.default_rng(0)
    draws = (rng.integers(len(each), size=len(each)) for _ in range(RESAMPLINGS))
    low, high = np.percentile([100 * edits[draw].sum() / words[draw].sum() for draw in draws], (2.5, 97.5))
    return float(low), float(high)


def sentence_error_rate(references: Sequence[str], hypotheses: Sequence[str]) -> float:
    """Percent of the pairs that differ in anything."""
    pairs = [said == heard for said, heard in zip(references, hypotheses, strict=True) if said]
    return 100 * (1 - sum(pairs) / len(pairs)) if pairs else 0.0


def right_words(reference: str, hypothesis: str) -> list[bool]:
    """For each word of the hypothesis: whether it stands in the reference where the alignment puts it."""
    if not reference or not hypothesis:
        return [False] * len(hypothesis.split())
    right = [False] * len(hypothesis.split())
    for chunk in jiwer.process_words(reference, hypothesis).alignments[0]:
        if chunk.type == "equal":
            right[chunk.hyp_start_idx : chunk.hyp_end_idx] = [True] * (chunk.hyp_end_idx - chunk.hyp_start_idx)
    return right


@dataclass(frozen=True)
class Transcribed:
    """A corpus as it was said and as it was heard."""

    cuts: list[MonoCut]
    references: list[str]  # normalised
    hypotheses: list[str]  # normalised
    transcripts: list[Transcript]
    seconds: float  # that it took


def iterate_for(recognizer: Recognizer, cuts: Iterable[MonoCut]) -> Iterator[tuple[MonoCut, np.ndarray | str]]:
    """`asr.corpus.iterate`; raises ValueError for a cut of another kind than the model takes."""
    for cut, sound in iterate(cuts):
        if input_kind(cut) != recognizer.takes:
            raise ValueError(f"{cut.id}: this is {input_kind(cut)}, and the model takes {recognizer.takes}")
        yield cut, sound


def transcribe_cuts(
    recognizer: Recognizer, cuts: CutSet, progress: Callable[[float], None] | None = None
) -> Transcribed:
    """Transcribes the cuts; what cannot be read is reported by name and left out. `progress` is told the seconds done.

    Raises ValueError where nothing could be read or has a transcript, or the model cannot take what was (sound instead
    of matrices, or of another width)."""
    _check_transcripts(recognizer, cuts)
    return _some(_transcribe(recognizer, cuts, progress))


def _check_transcripts(recognizer: Recognizer, cuts: CutSet) -> None:
    if not any(recognizer.model.normalize(cut.supervisions[0].text or "") for cut in cuts):
        raise ValueError("no utterance has a transcript to compare with")


def _some(done: Transcribed) -> Transcribed:
    if not any(done.references):
        raise ValueError("no utterance with a transcript could be read")
    return done


def _transcribe(recognizer: Recognizer, cuts: CutSet, progress: Callable[[float], None] | None) -> Transcribed:
    normalize = recognizer.model.normalize
    read = []

    def sounds():
        for cut, sound in iterate_for(recognizer, cuts):
            read.append(cut)
            yield sound

    started = time.monotonic()
    transcripts = list(recognizer.transcribe_all(sounds(), progress))
    took = time.monotonic() - started
    for cut, transcript in zip(read, transcripts, strict=True):
        if transcript.error:
            raise ValueError(f"{cut.id}: {transcript.error}")
    references = [normalize(cut.supervisions[0].text or "") for cut in read]
    return Transcribed(read, references, [normalize(transcript.text) for transcript in transcripts], transcripts, took)


def transcribe_together(
    recognizer: Recognizer, cuts: CutSet, progress: Callable[[float], None] | None = None
) -> Transcribed | None:
    """`transcribe_cuts`, with the cuts dealt out to the processes that torchrun (or another launcher that sets
    WORLD_SIZE and RANK) started: all of it, in order, in process 0, None in the others. Alone it does all itself."""
    rank, world = rank_and_world()
    if world == 1:
        return transcribe_cuts(recognizer, cuts, progress)
    _check_transcripts(recognizer, cuts)
    dealt = list(cuts)[rank::world]
    done = _transcribe(recognizer, CutSet.from_cuts(dealt), progress)
    place = {cut.id: rank + world * i for i, cut in enumerate(dealt)}
    rows = zip(done.cuts, done.references, done.hypotheses, done.transcripts, strict=True)
    mine = [(place[row[0].id], *row) for row in rows]
    torch.distributed.init_process_group("gloo", timeout=WAITING)
    everything: list | None = [None] * world if rank == 0 else None
    torch.distributed.gather_object((done.seconds, mine), everything)
    torch.distributed.destroy_process_group()
    if everything is None:
        return None
    rows = sorted((row for _, part in everything for row in part), key=itemgetter(0))
    columns = [[row[i] for row in rows] for i in range(1, 5)]  # four also where there is no row
    return _some(Transcribed(*columns, max(seconds for seconds, _ in everything)))


def rank_and_world() -> tuple[int, int]:
    """Which of how many processes this is."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _errors(process, references: Sequence[str], hypotheses: Sequence[str]) -> Errors:
    pairs = [(said, heard) for said, heard in zip(references, hypotheses, strict=True) if said]
    if not pairs:
        return Errors(0, 0, 0, 0)
    counts = process(*map(list, zip(*pairs, strict=True)))
    total = counts.hits + counts.substitutions + counts.deletions
    return Errors(counts.substitutions, counts.deletions, counts.insertions, total)
