"""Beam search over attention and CTC together (Hori et al. 2017), for a batch of utterances at once.

B utterances × W hypotheses advance in step: one pass of the decoder with caches, one matrix product for the CTC prefix
scores of the whole vocabulary, one top-k. A hypothesis that ends moves to a table of the W best ended ones. Its
utterance is done when no running hypothesis can overtake that table; done utterances leave the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asr.decode.ctc import NEVER, CTCPrefixScorer, PrefixState
from asr.decode.options import DecodeOptions, Hypothesis
from asr.model.decoder import DecoderState
from asr.model.transformer import Transformer
from asr.text.tokenizer import BLANK, EOS, SOS

CHECK_EVERY = 8  # steps between two looks at who is done: each is a host-device sync


@dataclass(frozen=True)
class Beam:
    """Everything about the running and the ended hypotheses of B utterances."""

    ids: Tensor  # (B,) places of the utterances in the batch
    tokens: Tensor  # (B, W, steps) of the running hypotheses
    attention: Tensor  # (B, W) log-probability by the decoder
    score: Tensor  # (B, W) of the running hypotheses
    ended_tokens: Tensor  # (B, W, most)
    ended_lens: Tensor  # (B, W)
    ended_score: Tensor  # (B, W), best first
    limit: Tensor  # (B,) most tokens a hypothesis may have
    decoder: DecoderState
    ctc: PrefixState | None


def beam_search(
    model: Transformer, memory: Tensor, memory_lens: Tensor, options: DecodeOptions
) -> list[list[Hypothesis]]:
    """The `options.nbest` best hypotheses of each utterance, best first; memory `(B, M, D)`, memory_lens `(B,)`."""
    scorer = CTCPrefixScorer(model.ctc_log_probs(memory), memory_lens) if options.ctc_weight else None
    beam = _start(model, memory, memory_lens, scorer, options)
    found: list[list[Hypothesis]] = [[] for _ in range(len(memory))]
    for step in range(int(memory_lens.max()) + 1):
        beam = _advance(model, beam, scorer, options, step)
        if step % CHECK_EVERY == CHECK_EVERY - 1:
            running = ~_done(beam, options, step + 1)
            if not running.all():
                _collect(beam, ~running, options, found)
                kept = running.nonzero()[:, 0]
                if not len(kept):
                    return found
                beam = _select(beam, kept)
                scorer = scorer and scorer.select_utterances(kept)
    _collect(beam, torch.ones_like(beam.ids, dtype=torch.bool), options, found)
    return found


def _start(
    model: Transformer, memory: Tensor, lens: Tensor, scorer: CTCPrefixScorer | None, options: DecodeOptions
) -> Beam:
    B, W, most = len(memory), options.beam_size, int(lens.max())
    score = memory.new_full((B, W), NEVER, dtype=torch.double)
    score[:, 0] = 0.0  # all hypotheses are alike at first: one is enough
    return Beam(
        ids=torch.arange(B, device=memory.device),
        tokens=lens.new_zeros(B, W, 0),
        attention=torch.zeros_like(score),
        score=score,
        ended_tokens=lens.new_zeros(B, W, most),
        ended_lens=lens.new_zeros(B, W),
        ended_score=torch.full_like(score, 2 * NEVER),
        limit=lens,
        decoder=model.decoder.start(memory, lens, W),
        ctc=scorer and scorer.start(W),
    )


def _advance(model: Transformer, beam: Beam, scorer: CTCPrefixScorer | None, options: DecodeOptions, step: int) -> Beam:
    W = beam.score.shape[1]
    newest = beam.tokens[:, :, -1] if step else torch.full_like(beam.ended_lens, SOS)
    log_probs, state = model.decoder.step(newest, beam.decoder)
    attention = beam.attention[:, :, None] + log_probs.double()
    score = attention * (1 - options.ctc_weight) + options.length_bonus * step
    dead = (beam.score <= NEVER)[:, :, None]
    if scorer is not None:
        prefix = scorer.score(beam.ctc)
        score = score + options.ctc_weight * prefix
        dead = dead | (prefix <= NEVER / 2)
    score = score.masked_fill(dead, NEVER)
    score[:, :, BLANK] = NEVER
    score[:, :, SOS] = NEVER
    ended = score[:, :, EOS].clone()
    score[:, :, EOS] = NEVER
    score = torch.where((step < beam.limit)[:, None, None], score + options.length_bonus, NEVER)
    # a hypothesis ends only where that is among the W best ways to go on: otherwise every prefix would be a candidate,
    # and a short one could win; a beam of one is greedy search
    worst = torch.cat([score.flatten(1), ended], dim=1).topk(W, dim=1).values[:, -1:]
    beam = _end(beam, ended.masked_fill(ended < worst, 2 * NEVER), step)
    best, index = score.flatten(1).topk(W, dim=1)
    parents, tokens = index // score.shape[2], index % score.shape[2]
    prefixes = beam.tokens.gather(1, parents[:, :, None].expand(-1, -1, step))
    return replace(
        beam,
        tokens=torch.cat([prefixes, tokens[:, :, None]], dim=2),
        attention=attention.flatten(1).gather(1, index),
        score=best,
        decoder=state.reorder(parents),
        ctc=scorer and scorer.advance(beam.ctc, parents, tokens),
    )


def _end(beam: Beam, score: Tensor, step: int) -> Beam:
    """Enters the running hypotheses as they would end now, `score (B, W)`, into the table of ended ones."""
    W = score.shape[1]
    best, index = torch.cat([beam.ended_score, score], dim=1).topk(W, dim=1)
    now = torch.nn.functional.pad(beam.tokens, (0, beam.ended_tokens.shape[2] - step))
    tokens = torch.cat([beam.ended_tokens, now], dim=1)
    lens = torch.cat([beam.ended_lens, torch.full_like(beam.ended_lens, step)], dim=1)
    return replace(
        beam,
        ended_tokens=tokens.gather(1, index[:, :, None].expand(-1, -1, tokens.shape[2])),
        ended_lens=lens.gather(1, index),
        ended_score=best,
    )


def _done(beam: Beam, options: DecodeOptions, step: int) -> Tensor:
    """Which utterances `(B,)` cannot change their n-best any more: log-probabilities only fall."""
    to_come = (beam.limit - step).clamp(min=0) * max(options.length_bonus, 0.0)
    return (beam.score[:, 0] + to_come < beam.ended_score[:, options.nbest - 1]) | (beam.score[:, 0] <= NEVER)


def _select(beam: Beam, utterances: Tensor) -> Beam:
    names = ("ids", "tokens", "attention", "score", "ended_tokens", "ended_lens", "ended_score", "limit")
    chosen = {name: getattr(beam, name).index_select(0, utterances) for name in names}
    ctc = beam.ctc and PrefixState(*(x.index_select(0, utterances) for x in vars(beam.ctc).values()))
    return Beam(**chosen, decoder=beam.decoder.select(utterances), ctc=ctc)


def _collect(beam: Beam, which: Tensor, options: DecodeOptions, found: list[list[Hypothesis]]) -> None:
    n, rows = options.nbest, which.nonzero()[:, 0]
    table = (beam.ids[rows], beam.ended_tokens[rows, :n], beam.ended_lens[rows, :n], beam.ended_score[rows, :n])
    for place, tokens, lens, scores in zip(*(column.tolist() for column in table), strict=True):
        found[place] = [
            Hypothesis(row[:size], score)
            for row, size, score in zip(tokens, lens, scores, strict=True)
            if score > NEVER
        ] or [Hypothesis([], NEVER)]
