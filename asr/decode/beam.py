"""Joint beam search over attention, CTC and a language model (Hori et al. 2017), for a whole batch of utterances.

B utterances × W hypotheses advance in step: one pass of the decoder with caches, one matrix product for the CTC prefix
scores of the whole vocabulary, one top-k. A hypothesis that ends moves to a table of the W best ended ones. An
utterance is done when no running hypothesis can overtake its table; done utterances leave the batch.

The decoder has also learnt the language of its transcripts. The bigram of the transcripts estimates this internal
language model, which can be subtracted where an external one is added (`asr.model.bigram`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from asr.decode.ctc import LOG_ZERO, CTCPrefixScorer, PrefixState
from asr.decode.options import DecodeOptions, Hypothesis
from asr.decode.phrases import Phrases
from asr.decode.repetition import Repetition
from asr.decode.timestamps import apply_timestamp_rules_
from asr.decode.top import top_k
from asr.model.cache import AttentionCache
from asr.model.decoder import DecoderState
from asr.model.language_model import LanguageModel
from asr.model.rows import select, select_rows
from asr.model.transformer import Transformer

# steps between two checks for done utterances, and between two compactions of the caches; on a GPU each is a sync
LOOKS = {"cpu": (2, 4), "cuda": (8, 8)}
RISE = 3.0  # nats by which a score may still rise if an internal language model is subtracted
# a running hypothesis may still win by the bonuses of so many tokens; waiting for more costs more than it gains
CATCHING_UP = 6
LEAVING = 5  # done utterances leave once they are a fifth of the batch: moving the others takes as long as a step


@dataclass(frozen=True)
class Running:
    """The W hypotheses of each of B utterances that may still grow."""

    tokens: Tensor  # (B, W, steps)
    scores: Tensor  # (B, W, steps) after each token
    additive: Tensor  # (B, W) the part of the score that is a sum over tokens: decoder, language model, bonus
    repetition: Repetition
    decoder: DecoderState | None
    ctc: PrefixState | None
    lm: AttentionCache | None
    phrase: Tensor | None  # (B, W) places in the phrase tree


@dataclass(frozen=True)
class Ended:
    """The W best ended hypotheses of each of B utterances, best first."""

    tokens: Tensor  # (B, W, steps)
    scores: Tensor  # (B, W, steps) after each token
    lens: Tensor  # (B, W)
    score: Tensor  # (B, W)


class Continuations(NamedTuple):
    """The ways in which the W hypotheses of B utterances can continue: with one of C tokens, or by ending."""

    tokens: Tensor | None  # (B, W, C); None: all tokens, C = V
    base: Tensor  # (B, W) score of the hypothesis, to which a token adds; double, like all sums over tokens
    gains: Tensor  # (B, W, C) what the token adds, without its bonus; single precision
    additive: Tensor | None  # (B, W, C) the part of the gain that is a sum over tokens; None: no part
    ending: Tensor  # (B, W) score of the hypothesis if it ends here; double


class BeamSearch:
    """A search over one batch. The decoder does not run if CTC has the whole weight."""

    def __init__(
        self,
        model: Transformer,
        memory: Tensor,
        memory_lens: Tensor,
        options: DecodeOptions,
        language_model: LanguageModel | None = None,
        phrases: Phrases | None = None,
    ):
        self.options = options
        self.phrases = phrases
        self.config = model.config
        self.look_at_done, self.look_at_past = LOOKS["cpu" if memory.device.type == "cpu" else "cuda"]
        self.lm = language_model
        self.limit = model.config.most_tokens(memory_lens)  # (B,) most tokens of a hypothesis
        if self.lm is not None and self.lm.config.longest_transcript is not None:
            self.limit = self.limit.clamp(max=self.lm.config.longest_transcript)
        self.suppressed, self.suppressed_first = (
            torch.tensor(ids, dtype=torch.long, device=memory.device)
            for ids in (model.config.suppressed, model.config.suppressed_first)
        )
        self.decoder = model.decoder if options.ctc_weight < 1 else None
        self.ilm = model.bigram.log_probs if self.decoder is not None and options.ilm_weight else None  # (V, V)
        self.ctc = CTCPrefixScorer.of(model.ctc_log_probs(memory), memory_lens) if options.ctc_weight else None
        self.generator = torch.Generator(memory.device).manual_seed(0) if options.temperature else None
        self.places = torch.arange(len(memory), device=memory.device)  # which of all utterances are still in the batch
        self.found: list[list[Hypothesis]] = [[] for _ in range(len(memory))]
        self.running, self.ended = self._start(memory, memory_lens)

    def run(self) -> list[list[Hypothesis]]:
        """The `options.nbest` best hypotheses of each utterance, best first."""
        for step in range(int(self.limit.max()) + 1):
            self.advance(step)
            length = step + 1
            if length % self.look_at_done == 0:
                done = self._done(length)
                count = int(done.sum())
                if count * LEAVING >= len(done):
                    self._collect(done)
                    if count == len(done):
                        return self.found
                    self._keep((~done).nonzero()[:, 0])
            if length % self.look_at_past == 0:
                self.compact()
        self._collect(torch.ones_like(self.places, dtype=torch.bool))
        return self.found

    def _start(self, memory: Tensor, lens: Tensor) -> tuple[Running, Ended]:
        B, W = len(memory), self.options.beam_size
        zero = memory.new_zeros(B, W, dtype=torch.double)
        decoder = self.decoder and self.decoder.start(memory, lens, W)
        for token in self.config.prompt[:-1]:
            prompt = lens.new_full((B, W), token)
            decoder = decoder and self.decoder.step(prompt, decoder)[1]
        ctc = None
        if self.ctc:
            self.ctc, ctc = self.ctc.follow(self.ctc.start(W), self.look_at_past)
        running = Running(
            tokens=lens.new_zeros(B, W, 0),
            scores=zero.new_zeros(B, W, 0),
            additive=zero,
            repetition=Repetition.start(B, W, memory.device),
            decoder=decoder,
            ctc=ctc,
            lm=self.lm and self.lm.start(B, W),
            phrase=self.phrases and lens.new_full((B, W), self.phrases.start),
        )
        nothing = lens.new_zeros(B, W)
        return running, Ended(running.tokens, running.scores, nothing, torch.full_like(zero, 2 * LOG_ZERO))

    def advance(self, step: int) -> None:
        """Extends every hypothesis by one token."""
        now, options = self.running, self.options
        W = options.beam_size
        newest = now.tokens[:, :, -1] if step else torch.full_like(self.ended.lens, self.config.prompt[-1])
        gains, decoder, lm = None, None, None
        if self.decoder is not None:
            gains, decoder = self.decoder.step(newest, now.decoder)
            gains = gains.mul_(1 - options.ctc_weight) if options.ctc_weight else gains
        if self.lm is not None:
            log_probs, lm = self.lm.step(newest, now.lm)
            log_probs = log_probs.mul_(options.lm_weight)
            gains = log_probs if gains is None else gains.add_(log_probs)
        if self.ilm is not None:
            gains.sub_(torch.nn.functional.embedding(newest, self.ilm), alpha=options.ilm_weight)
        if self.phrases is not None:
            earned = torch.nn.functional.embedding(now.phrase, self.phrases.gains)
            gains = earned if gains is None else gains.add_(earned)
        # at first all hypotheses are alike: one is enough
        dead = (
            now.scores[:, :, -1] <= LOG_ZERO if step else (torch.arange(W, device=newest.device) > 0).expand_as(newest)
        )
        if options.temperature:  # no hypothesis may overtake a draw that has ended
            dead = dead | (self.ended.score > LOG_ZERO)
        ways = self._ways_with_ctc(gains, dead, step) if self.ctc else self._ways(gains, dead, step)
        lead = ways.base - ways.base.amax(dim=1, keepdim=True)
        index = (ways.gains + lead.float()[:, :, None]).flatten(1).topk(W, dim=1).indices
        parents = index // ways.gains.shape[2]
        tokens = index % ways.gains.shape[2] if ways.tokens is None else ways.tokens.flatten(1).gather(1, index)
        bonus = torch.where(step < self.limit, options.length_bonus, 2 * LOG_ZERO)[:, None]
        best = ways.base.gather(1, parents) + ways.gains.flatten(1).gather(1, index) + bonus
        # a hypothesis ends only if that is among the W best continuations: otherwise every prefix would be a candidate,
        # and a short one could win; a beam of one is greedy search
        worst = torch.cat([best, ways.ending], dim=1).topk(W, dim=1).values[:, -1:]
        self._end(ways.ending.masked_fill(ways.ending < worst, 2 * LOG_ZERO), step)
        additive = now.additive.gather(1, parents) + options.length_bonus
        if ways.additive is not None:
            additive += ways.additive.flatten(1).gather(1, index)
        self.running = Running(
            tokens=torch.cat([select_rows(now.tokens, parents), tokens[:, :, None]], dim=2),
            scores=torch.cat([select_rows(now.scores, parents), best[:, :, None]], dim=2),
            additive=additive,
            repetition=now.repetition.advance(parents, tokens),
            decoder=decoder and decoder.reorder(parents),
            ctc=self.ctc and self.ctc.advance(now.ctc, parents, tokens),
            lm=lm and lm.reorder(parents),
            phrase=self.phrases and self.phrases.advance(now.phrase.gather(1, parents), tokens),
        )

    def _ways(self, gains: Tensor, dead: Tensor, step: int) -> Continuations:
        """The W best continuations of each hypothesis, from `gains (B, W, V)` of each token, which are overwritten."""
        eos = self.config.eos
        end = gains[:, :, eos].clone()
        self._forbid(gains, step)
        if self.config.first_timestamp is not None:
            apply_timestamp_rules_(gains, self.running.tokens, self.config, LOG_ZERO)
        if self.options.temperature:  # the highest is a draw from the tempered distribution (Gumbel 1954)
            gains = gains / self.options.temperature + self._gumbel(gains)
        # at the limit a hypothesis ends, allowed or not
        end = torch.where((step < self.limit)[:, None], gains[:, :, eos], end)
        base = self.running.additive.masked_fill(dead, LOG_ZERO)
        gains[:, :, eos] = LOG_ZERO
        values, tokens = top_k(gains, min(self.options.beam_size, gains.shape[2]))
        return Continuations(tokens, base, values, values, base + end)

    def _ways_with_ctc(self, additive: Tensor | None, dead: Tensor, step: int) -> Continuations:
        """The continuations with CTC: by all tokens, whose prefix scores come from one matrix product."""
        eos, weight = self.config.eos, self.options.ctc_weight
        prefix = self.ctc.score(self.running.ctc)
        base = self.running.additive + weight * prefix.base[:, :, 0]
        base.masked_fill_(dead | (prefix.base[:, :, 0] <= LOG_ZERO / 2), LOG_ZERO)
        end = self.running.additive + weight * prefix.ended
        gains = prefix.gains.mul_(weight)
        if additive is not None:
            end += additive[:, :, eos]
            gains += additive
        gains[:, :, eos] = 0.0  # unless the end is forbidden
        self._forbid(gains, step)
        end.masked_fill_(dead | (gains[:, :, eos] <= LOG_ZERO), LOG_ZERO)
        gains[:, :, eos] = LOG_ZERO
        return Continuations(None, base, gains, additive, end)

    def _gumbel(self, like: Tensor) -> Tensor:
        uniform = torch.rand(like.shape, generator=self.generator, device=like.device)
        return -(-uniform.clamp_(min=1e-20).log_()).log_()

    def _forbid(self, scores: Tensor, step: int) -> None:
        """Lowers the `scores (B, W, V)` of tokens that cannot come next to `LOG_ZERO`, in place."""
        scores.index_fill_(2, self.suppressed, LOG_ZERO)
        if not step:
            scores.index_fill_(2, self.suppressed_first, LOG_ZERO)
        if step >= self.options.max_repeats:
            self.running.repetition.forbid_(scores, self.options.max_repeats, LOG_ZERO)

    def compact(self) -> None:
        """Drops the cache slots that no hypothesis descends from, and moves CTC's window along; a host-device sync."""
        now = self.running
        if self.ctc:
            self.ctc, ctc = self.ctc.follow(now.ctc, self.look_at_past)
            now = replace(now, ctc=ctc)
        self.running = replace(now, decoder=now.decoder and now.decoder.compact(), lm=now.lm and now.lm.compact())

    def _end(self, score: Tensor, step: int) -> None:
        """Enters the running hypotheses into the table of ended ones, with their `score (B, W)` if they end now."""
        now, ended = self.running, self.ended
        best, index = torch.cat([ended.score, score], dim=1).topk(score.shape[1], dim=1)
        room = (0, step - ended.tokens.shape[2])
        tokens = torch.cat([torch.nn.functional.pad(ended.tokens, room), now.tokens], dim=1)
        scores = torch.cat([torch.nn.functional.pad(ended.scores, room), now.scores], dim=1)
        lens = torch.cat([ended.lens, torch.full_like(ended.lens, step)], dim=1)
        self.ended = Ended(select_rows(tokens, index), select_rows(scores, index), lens.gather(1, index), best)

    def _done(self, length: int) -> Tensor:
        """Which utterances `(B,)`, with hypotheses of `length` tokens, will not change their n-best any more:
        log-probabilities only fall, except for what bonuses and a subtracted score may bring back."""
        best = self.running.scores[:, 0, -1] + (0.0 if self.ilm is None else RISE)
        bonus = max(self.options.length_bonus, 0.0) + (self.options.phrase_weight if self.phrases else 0.0)
        to_come = (self.limit - length).clamp(0, CATCHING_UP) * bonus
        return (best + to_come < self.ended.score[:, self.options.nbest - 1]) | (best <= LOG_ZERO)

    def _keep(self, utterances: Tensor) -> None:
        """Continues with these utterances of the batch only."""
        self.places, self.limit = self.places[utterances], self.limit[utterances]
        self.ctc, self.running, self.ended = select((self.ctc, self.running, self.ended), utterances)

    def _collect(self, which: Tensor) -> None:
        """Stores the n-best of the utterances where `which (B,)` is True, from the table of ended hypotheses."""
        n, rows, ended, bonus = self.options.nbest, which.nonzero()[:, 0], self.ended, self.options.length_bonus
        columns = (self.places, ended.tokens[:, :n], ended.scores[:, :n], ended.lens[:, :n], ended.score[:, :n])
        for place, *hypotheses in zip(*(column[rows].tolist() for column in columns), strict=True):
            self.found[place] = [
                Hypothesis(tokens[:size], score, [b - a - bonus for a, b in pairwise([0.0, *scores[:size]])])
                for tokens, scores, size, score in zip(*hypotheses, strict=True)
                if score > LOG_ZERO
            ] or [Hypothesis([], LOG_ZERO)]
