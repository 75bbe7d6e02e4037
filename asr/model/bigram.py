"""The language that a model has learnt from its training transcripts, as a bigram over its tokens.

Subtracted when a language model is added, it is a low-order density ratio (Zheng, An & Ou 2022, "An empirical study of
language model integration for transducer based speech recognition"). It is smoothed by absolute discounting (Ney, Essen
& Kneser 1994, "On structuring probabilistic dependences in stochastic language modelling").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from asr.model.config import ModelConfig
from asr.model.folder import write_tensors

FILE = "bigram.safetensors"
MOST_TOKENS = 8192  # in the vocabulary: the table of all pairs then takes a quarter of a gigabyte
DISCOUNT = 0.75


class Bigram(nn.Module):
    """Counts of how often one token follows another."""

    def __init__(self, pairs: Tensor, counts: Tensor, vocab_size: int):
        """`pairs (n,)`, each once: the first token's id · V + the second token's id; `counts (n,)`."""
        super().__init__()
        self.register_buffer("pairs", pairs, persistent=False)
        self.register_buffer("counts", counts, persistent=False)
        self.vocab_size = vocab_size

    @classmethod
    def of(cls, transcripts: Iterable[Sequence[int]], config: ModelConfig) -> Bigram:
        """The bigram of transcripts, given as tokens without start and end."""
        V, start, end = config.vocab_size, config.prompt[-1], config.eos
        counts: Counter[int] = Counter()
        for ids in transcripts:
            counts.update(first * V + second for first, second in pairwise((start, *ids, end)))
        pairs = sorted(counts)
        often = [counts[pair] for pair in pairs]
        return cls(torch.tensor(pairs, dtype=torch.int64), torch.tensor(often, dtype=torch.int64), V)

    @cached_property
    def log_probs(self) -> Tensor:
        """log p(second | first) `(V, V)`, float32, by absolute discounting: DISCOUNT is subtracted from each count, and
        the mass that this frees is distributed by the unigram, with one added to the count of each token."""
        V = self.vocab_size
        often = self.counts.float()
        counts = often.new_zeros(V * V).index_put_((self.pairs,), often).view(V, V)
        alone = (counts.sum(0) + 1) / (counts.sum() + V)
        kept = (counts - DISCOUNT).clamp(min=0) / counts.sum(1, keepdim=True).clamp(min=1)
        return (kept + (1 - kept.sum(1, keepdim=True)) * alone).log()

    def _apply(self, *args, **kwargs) -> Bigram:
        self.__dict__.pop("log_probs", None)  # it may belong on another device from now on
        return super()._apply(*args, **kwargs)

    def save(self, folder: str | Path) -> None:
        """Writes `folder / bigram.safetensors`."""
        write_tensors({"pairs": self.pairs.int().cpu(), "counts": self.counts.int().cpu()}, Path(folder) / FILE)

    @classmethod
    def load(cls, folder: str | Path, vocab_size: int) -> Bigram | None:
        """The bigram in a model folder; None if the folder has none. Raises ValueError, KeyError or SafetensorError if
        the file holds no bigram or one of another vocabulary."""
        path = Path(folder) / FILE
        if not path.is_file():
            return None
        stored = load_file(path)
        pairs, counts = stored["pairs"].long(), stored["counts"]
        if pairs.shape != counts.shape or not ((pairs >= 0) & (pairs < vocab_size**2)).all():
            raise ValueError(f"{FILE} is not of {vocab_size} tokens")
        return cls(pairs, counts, vocab_size)
