"""The options of a search, and the hypotheses that it finds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import Field, dataclass, field, fields
from numbers import Integral, Real
from typing import Any

STRATEGIES = ("beam", "rescore", "ctc", "greedy")
KINDS = {"str": str, "int": Integral, "float": Real}  # types of an option's values; numpy's numbers are among them


@dataclass(frozen=True)
class DecodeOptions:
    """Options of a search; their values are checked here and nowhere else."""

    # beam: attention, CTC and language model together, token by token; rescore: the n-best of CTC (and language model),
    # then one pass of the decoder over all of them; ctc: without the decoder, beam_size 1 is the likeliest path;
    # greedy: the likeliest next token by attention only (and phrases)
    strategy: str = "beam"
    beam_size: int = 10  # hypotheses kept at each step, per utterance
    ctc_weight: float = 0.3  # share of the CTC prefix score; attention has the rest
    lm_weight: float = 0.3  # weight of the language model's log-probability, if there is a language model
    # weight of the log-probability, subtracted, of the bigram of the model's transcripts, which stands for the language
    # that its decoder has learnt; only if there is a language model to take its place
    ilm_weight: float = 0.0
    ngram_weight: float = 0.3  # weight of the n-gram model that rescores what the search found, if there is one
    phrases: tuple[str, ...] = ()  # words and word sequences that are likelier than the model thinks: names, terms
    phrase_weight: float = 1.0  # added to the score for each token of a phrase that is written to its end
    length_bonus: float = 0.0  # added to the score for each token
    max_repeats: int = 8  # times that a block of tokens may occur in a row, so that loops end
    temperature: float = 0.0  # of greedy search: above 0 each token is drawn from softmax(log-posteriors / temperature)
    fallback: tuple[float, ...] = ()  # temperatures to try in turn for a doubtful transcript (asr.decode.fallback)
    nbest: int = 1  # hypotheses returned per utterance; at most the beam size

    def __post_init__(self):
        if isinstance(self.phrases, str):
            object.__setattr__(self, "phrases", (self.phrases,))
        for option in fields(self):
            object.__setattr__(self, option.name, _of_its_type(option, getattr(self, option.name)))
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy: {self.strategy!r} is not one of {', '.join(STRATEGIES)}")
        if self.beam_size < 1:
            raise ValueError(f"beam_size must be at least 1, not {self.beam_size}")
        if not 0 <= self.ctc_weight <= 1:
            raise ValueError(f"ctc_weight must lie in [0, 1], not {self.ctc_weight}")
        if self.strategy == "rescore" and not self.ctc_weight:
            raise ValueError("strategy rescore takes its n-best from CTC: ctc_weight must be above 0")
        if self.phrases and self.strategy == "ctc" and self.beam_size == 1:
            raise ValueError("phrases need a search: strategy ctc with a beam_size of 1 takes the best path")
        for name in ("lm_weight", "ilm_weight", "ngram_weight", "phrase_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be finite and not negative, not {getattr(self, name)}")
        if not math.isfinite(self.length_bonus):
            raise ValueError(f"length_bonus must be finite, not {self.length_bonus}")
        if self.max_repeats < 2:
            raise ValueError(f"max_repeats must be at least 2, not {self.max_repeats}")
        if not 0 <= self.temperature < math.inf or not all(0 < temperature < math.inf for temperature in self.fallback):
            raise ValueError("temperature must be finite and not negative, those of fallback finite and positive")
        if self.temperature and self.strategy != "greedy":
            raise ValueError(f"temperature is for strategy greedy, not {self.strategy}")
        if self.strategy == "greedy" and self.nbest > 1:
            raise ValueError(f"strategy greedy finds one hypothesis: nbest is 1 there, not {self.nbest}")
        if not 1 <= self.nbest <= self.beam_size:
            raise ValueError(f"nbest must lie between 1 and the beam size, {self.beam_size}, not {self.nbest}")


def _of_its_type(option: Field, value: Any) -> Any:
    """The value of an option, several as a tuple. Raises TypeError for another type; numpy's numbers are accepted."""
    several = option.type.startswith("tuple")
    kind = option.type.removeprefix("tuple[").partition(",")[0]
    if several and isinstance(value, Iterable):
        value = tuple(value)
    each = value if several else (value,)
    if not isinstance(each, tuple) or any(isinstance(x, bool) or not isinstance(x, KINDS[kind]) for x in each):
        raise TypeError(f"{option.name} is {'a tuple of ' if several else ''}{kind}, not {value!r}")
    return value


# for models that `asr.model.foreign` imports: without CTC, and with the temperatures of Whisper's own decoding
IMPORTED = DecodeOptions(beam_size=5, ctc_weight=0.0, fallback=(0.2, 0.4, 0.6, 0.8, 1.0))


def default_options(has_ctc: bool) -> DecodeOptions:
    """The options for a model that was not tuned."""
    return DecodeOptions() if has_ctc else IMPORTED


@dataclass(frozen=True)
class Hypothesis:
    """A possible transcript of an utterance."""

    tokens: list[int]  # without start and end
    score: float  # log-probability by the weighted scorers, plus the length bonus
    # what each token added to the score, without bonuses: how sure the model (with its helpers) is of it
    token_scores: list[float] = field(default_factory=list)
    spans: list[tuple[float, float]] | None = None  # encoder frames in which CTC hears each token, if requested
