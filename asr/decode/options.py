"""How to search, and what a search finds."""

from __future__ import annotations

from dataclasses import dataclass

STRATEGIES = ("beam", "greedy", "ctc")


@dataclass(frozen=True)
class DecodeOptions:
    """Options of a search; checked here and nowhere else."""

    strategy: str = "beam"  # beam; greedy: the likeliest next token by attention alone; ctc: the likeliest CTC path
    beam_size: int = 10  # hypotheses kept at each step, per utterance
    ctc_weight: float = 0.3  # share of the CTC prefix score; the attention has the rest
    length_bonus: float = 0.0  # added to the score for each token
    nbest: int = 1  # hypotheses returned per utterance; at most the beam size

    def __post_init__(self):
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy: {self.strategy!r} is not one of {', '.join(STRATEGIES)}")
        if self.beam_size < 1:
            raise ValueError(f"beam_size must be at least 1, not {self.beam_size}")
        if not 0 <= self.ctc_weight <= 1:
            raise ValueError(f"ctc_weight must lie in [0, 1], not {self.ctc_weight}")
        if not 1 <= self.nbest <= (self.beam_size if self.strategy == "beam" else 1):
            raise ValueError(f"nbest must lie between 1 and the beam size, not {self.nbest}")


@dataclass(frozen=True)
class Hypothesis:
    """One way to write an utterance."""

    tokens: list[int]  # without start and end
    score: float  # log-probability by the weighted scorers, plus the length bonus
