"""A second try for doubtful transcripts: tokens drawn at rising temperatures (Radford et al. 2022, section 4.5)."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from asr.decode.options import DecodeOptions, Hypothesis
from asr.decode.phrases import Phrases
from asr.decode.search import attention_scores, search
from asr.model.language_model import LanguageModel
from asr.model.transformer import Transformer

MOST_COMPRESSED = 2.4  # ratio of the bytes of a text to those that zlib packs it into: above it, a text repeats itself
LEAST_LIKELY = -1.0  # mean log-probability of a token


def needs_fallback(text: str, tokens: int, log_prob: float) -> bool:
    """Whether a transcript of so many `tokens` repeats itself or is unlikely; an empty one is neither."""
    if not text:
        return False
    written, mean = text.encode(), log_prob / (tokens + 1)
    return len(written) / len(zlib.compress(written)) > MOST_COMPRESSED or mean < LEAST_LIKELY


def search_with_fallback(
    model: Transformer,
    memory: Tensor,
    memory_lens: Tensor,
    options: DecodeOptions,
    language_model: LanguageModel | None,
    text: Callable[[Hypothesis], str],
    phrases: Phrases | None = None,
) -> list[list[Hypothesis]]:
    """Runs `search`, then draws new tokens for utterances whose best hypothesis, as `text` writes it, is doubtful, at
    each temperature of `options.fallback` in turn, until none is. The last draw replaces all of an utterance's
    hypotheses."""
    found = search(model, memory, memory_lens, options, language_model, phrases)
    for temperature in options.fallback:
        best = [hypotheses[0] for hypotheses in found]
        log_probs = [hypothesis.score for hypothesis in best]
        if options.ctc_weight or options.length_bonus or language_model or phrases:  # the search's score includes more
            scores = attention_scores(model, memory, memory_lens, [[hypothesis] for hypothesis in best])
            log_probs = [sum(score) for (score,) in scores]
        judged = zip(best, log_probs, strict=True)
        again = [b for b, (h, log_prob) in enumerate(judged) if needs_fallback(text(h), len(h.tokens), log_prob)]
        if not again:
            break
        rows = torch.tensor(again, device=memory.device)
        drawing = replace(options, strategy="greedy", temperature=temperature, nbest=1)
        for b, drawn in zip(
            again, search(model, memory[rows], memory_lens[rows], drawing, phrases=phrases), strict=True
        ):
            found[b] = drawn
    return found
