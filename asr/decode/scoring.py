"""Word and character error rates (jiwer does the alignment)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jiwer


@dataclass(frozen=True)
class Errors:
    """Edits from the references to the hypotheses, summed over utterances."""

    substitutions: int
    deletions: int
    insertions: int
    total: int  # words or characters of the references

    @property
    def rate(self) -> float:
        """Errors in percent of the references' words or characters."""
        return 100 * (self.substitutions + self.deletions + self.insertions) / max(1, self.total)


def word_errors(references: Sequence[str], hypotheses: Sequence[str]) -> Errors:
    """WER's counts over pairs of texts that are normalised alike; pairs whose reference is empty do not count."""
    return _errors(jiwer.process_words, references, hypotheses)


def character_errors(references: Sequence[str], hypotheses: Sequence[str]) -> Errors:
    """CER's counts, spaces included."""
    return _errors(jiwer.process_characters, references, hypotheses)


def _errors(process, references: Sequence[str], hypotheses: Sequence[str]) -> Errors:
    pairs = [(said, heard) for said, heard in zip(references, hypotheses, strict=True) if said]
    if not pairs:
        return Errors(0, 0, 0, 0)
    counts = process(*map(list, zip(*pairs, strict=True)))
    total = counts.hits + counts.substitutions + counts.deletions
    return Errors(counts.substitutions, counts.deletions, counts.insertions, total)
