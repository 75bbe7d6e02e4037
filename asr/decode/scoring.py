"""Word and character error rates, with confidence intervals; jiwer does the alignment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jiwer
import numpy as np

RESAMPLINGS = 1000


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
    """Error counts for the WER over pairs of texts normalised alike; words heard where none was said are insertions.
    Raises TypeError for a text in place of a list, as `character_errors` does."""
    return _errors(jiwer.process_words, references, hypotheses)


def character_errors(references: Sequence[str], hypotheses: Sequence[str]) -> Errors:
    """Error counts for the CER, spaces included."""
    return _errors(jiwer.process_characters, references, hypotheses)


def wer_interval(references: Sequence[str], hypotheses: Sequence[str]) -> tuple[float, float]:
    """95 % confidence interval of the WER in percent, by bootstrap over utterances (Bisani & Ney 2004)."""
    each = [word_errors([said], [heard]) for said, heard in zip(references, hypotheses, strict=True)]
    if not each:
        return 0.0, 0.0
    edits, words = np.array([(errors.edits, errors.total) for errors in each]).T
    rng = np.random.default_rng(0)
    draws = (rng.integers(len(each), size=len(each)) for _ in range(RESAMPLINGS))
    low, high = np.percentile([100 * edits[draw].sum() / max(1, words[draw].sum()) for draw in draws], (2.5, 97.5))
    return float(low), float(high)


def sentence_error_rate(references: Sequence[str], hypotheses: Sequence[str]) -> float:
    """Percentage of the pairs that differ at all."""
    right = [said == heard for said, heard in zip(references, hypotheses, strict=True)]
    return 100 * (1 - sum(right) / len(right)) if right else 0.0


def right_words(reference: str, hypothesis: str) -> list[bool]:
    """Whether each word of the hypothesis equals the word of the reference that it is aligned with."""
    right = [False] * len(hypothesis.split())
    for chunk in jiwer.process_words(reference, hypothesis).alignments[0]:
        if chunk.type == "equal":
            right[chunk.hyp_start_idx : chunk.hyp_end_idx] = [True] * (chunk.hyp_end_idx - chunk.hyp_start_idx)
    return right


def _errors(process, references: Sequence[str], hypotheses: Sequence[str]) -> Errors:
    if isinstance(references, str) or isinstance(hypotheses, str):  # of which each letter would be an utterance
        raise TypeError("references and hypotheses are lists of texts, not a text")
    counts = process(list(references), list(hypotheses))
    total = counts.hits + counts.substitutions + counts.deletions
    return Errors(counts.substitutions, counts.deletions, counts.insertions, total)
