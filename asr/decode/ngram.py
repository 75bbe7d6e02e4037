"""A word n-gram model, read by KenLM (Heafield 2011), that rescores the hypotheses of a search."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path

from asr.audio.reading import printable
from asr.decode.options import Hypothesis
from asr.model.folder import ModelError

DOUBTFUL = 5  # words of an utterance, all of them unknown, for a warning: perhaps the model has capitals

logger = logging.getLogger(__name__)


class NGram:
    """An n-gram model of words as the recogniser's normaliser writes them."""

    doubted = True  # until a word is in the model, or a warning was given that none is

    def __init__(self, path: str | Path):
        """`path`: ARPA or KenLM's binary format. Raises ModelError if it is neither, or if KenLM is missing."""
        try:
            import kenlm
        except ImportError:
            raise ModelError("an n-gram model needs KenLM: pip install '.[ngram]'") from None
        if not Path(path).is_file():
            raise ModelError(f"{path}: no such n-gram model")
        quiet = kenlm.Config()
        quiet.show_progress, quiet.arpa_complain = False, kenlm.ARPALoadComplain.NONE
        try:
            self.model = kenlm.Model(str(path), quiet)
        except (OSError, RuntimeError, UnicodeEncodeError) as error:
            raise ModelError(
                f"{printable(path)}: not an n-gram model that KenLM reads ({str(error).splitlines()[0]})"
            ) from None

    def log_prob(self, text: str) -> float:
        """The natural log-probability of the words of `text` and of the end after them."""
        return self.model.score(text) * math.log(10)

    def rescore(self, hypotheses: list[Hypothesis], texts: list[str], weight: float) -> list[Hypothesis]:
        """The hypotheses with `weight` times the log-probability of their texts added to their scores, best first."""
        if self.doubted:
            self._doubt({word for text in texts for word in text.split()})
        rescored = [
            replace(hypothesis, score=hypothesis.score + weight * self.log_prob(text))
            for hypothesis, text in zip(hypotheses, texts, strict=True)
        ]
        return sorted(rescored, key=lambda hypothesis: -hypothesis.score)

    def _doubt(self, words: set[str]) -> None:
        if any(word in self.model for word in words):
            self.doubted = False
        elif len(words) >= DOUBTFUL:
            logger.warning(
                "the n-gram model knows none of %s: it needs words as the normaliser writes them", sorted(words)
            )
            self.doubted = False
