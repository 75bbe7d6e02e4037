"""From the encoder's memory to hypotheses: the search of each strategy, and the second pass over an n-best list."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from asr.decode.beam import BeamSearch
from asr.decode.ctc import ctc_greedy
from asr.decode.options import DecodeOptions, Hypothesis
from asr.decode.phrases import Phrases
from asr.model.bigram import MOST_TOKENS
from asr.model.decoder import targets
from asr.model.language_model import LanguageModel
from asr.model.transformer import Transformer


@torch.inference_mode()
def search(
    model: Transformer,
    memory: Tensor,
    memory_lens: Tensor,
    options: DecodeOptions,
    language_model: LanguageModel | None = None,
    phrases: Phrases | None = None,
) -> list[list[Hypothesis]]:
    """The best hypotheses of each utterance, best first, from the encoder's memory `(B, M, D)`, memory_lens `(B,)`.

    An utterance without frames gets the empty hypothesis. The language model has the same tokens as the model; greedy
    search does not use it. `phrases` are the tables of `options.phrases`."""
    check_options(model, options, language_model)
    if options.strategy == "greedy":
        options, language_model = replace(options, beam_size=1, ctc_weight=0.0, length_bonus=0.0), None
    if language_model is None or not options.lm_weight:
        options, language_model = replace(options, ilm_weight=0.0), None
    if options.strategy == "ctc":
        if options.beam_size == 1:
            return ctc_greedy(model.ctc_log_probs(memory), memory_lens)
        options = replace(options, ctc_weight=1.0)
    elif options.strategy == "rescore" and options.ctc_weight < 1:  # else the decoder has nothing to add
        return _rescored(model, memory, memory_lens, options, language_model, phrases)
    found = BeamSearch(model, memory, memory_lens, options, language_model, phrases).run()
    if phrases is not None:
        found = _without(found, phrase_gains(phrases, found, model.config.eos))
    if options.temperature:  # a drawn hypothesis is scored by its own log-probability
        scores = attention_scores(model, memory, memory_lens, found)
        return [
            [Hypothesis(h.tokens, sum(ours), ours[:-1]) for h, ours in zip(*both, strict=True)]
            for both in zip(found, scores, strict=True)
        ]
    return found


def check_options(model: Transformer, options: DecodeOptions, language_model: LanguageModel | None = None) -> None:
    """Raises ValueError if the options need a CTC head or a bigram of its transcripts that the model does not have."""
    if language_model is not None and options.lm_weight and options.ilm_weight and model.bigram is None:
        raise ValueError(
            "ilm_weight: this model has no bigram of its transcripts (asr.train writes one for vocabularies of "
            f"up to {MOST_TOKENS} tokens)"
        )
    if model.ctc is None and options.strategy != "greedy" and (options.strategy != "beam" or options.ctc_weight):
        raise ValueError("this model has no CTC head: use strategy beam with a ctc_weight of 0, or greedy")


def _rescored(
    model: Transformer,
    memory: Tensor,
    memory_lens: Tensor,
    options: DecodeOptions,
    language_model: LanguageModel | None,
    phrases: Phrases | None,
) -> list[list[Hypothesis]]:
    """The n-best list of CTC (and the language model), rescored by the decoder in one pass over all hypotheses.

    In the first pass CTC has the weight of both: the language model, the length bonus and the phrases are as strong
    relative to it as they are to CTC and decoder together."""
    w = options.ctc_weight
    first = replace(options, ctc_weight=1.0, nbest=options.beam_size)
    found = BeamSearch(model, memory, memory_lens, first, language_model, phrases).run()
    gains = [[[] for _ in hypotheses] for hypotheses in found]
    if phrases is not None:
        gains = phrase_gains(phrases, found, model.config.eos)
        found = _without(found, gains)
    rows, Y, Y_lens = in_one_batch(found, memory.device)
    eos = model.config.eos
    beside = label_log_probs(model, memory[rows], memory_lens[rows], Y, Y_lens).double()
    if language_model is not None:
        beside += options.lm_weight * _of_labels(language_model.teacher_forced(Y), Y, Y_lens, eos)
    beside *= 1 - w
    if options.ilm_weight:
        before = nn.functional.pad(Y, (1, 0), value=model.config.prompt[-1])
        beside -= options.ilm_weight * _of_labels(model.bigram.log_probs[before], Y, Y_lens, eos)
    rescored = []
    for hypotheses, *both in zip(found, _dealt_out(beside, found), gains, strict=True):
        best = []
        for hypothesis, more, gained in zip(hypotheses, *both, strict=True):
            steps = [w * a + b for a, b in zip(hypothesis.token_scores, more[:-1], strict=True)]
            bonuses = sum(gained) + options.length_bonus * len(hypothesis.tokens)
            score = w * hypothesis.score + sum(more) + (1 - w) * bonuses
            best.append(Hypothesis(hypothesis.tokens, score, steps))
        rescored.append(sorted(best, key=lambda h: -h.score)[: options.nbest])
    return rescored


def attention_scores(
    model: Transformer, memory: Tensor, memory_lens: Tensor, found: list[list[Hypothesis]]
) -> list[list[list[float]]]:
    """The decoder's log-probabilities of all tokens of every hypothesis and of its end, in one pass."""
    rows, Y, Y_lens = in_one_batch(found, memory.device)
    return _dealt_out(label_log_probs(model, memory[rows], memory_lens[rows], Y, Y_lens), found)


def phrase_gains(phrases: Phrases, found: list[list[Hypothesis]], eos: int) -> list[list[list[float]]]:
    """What phrases added to the scores of hypotheses at every token and at the end."""
    _, Y, Y_lens = in_one_batch(found, phrases.gains.device)
    labels = targets(Y, Y_lens, eos)
    return _dealt_out(phrases.along(labels.clamp(min=0)), found)


def _without(found: list[list[Hypothesis]], gains: list[list[list[float]]]) -> list[list[Hypothesis]]:
    """The hypotheses with token scores free of the phrases' gains."""
    return [
        [
            replace(h, token_scores=[score - gain for score, gain in zip(h.token_scores, gained, strict=False)])
            for h, gained in zip(*both, strict=True)
        ]
        for both in zip(found, gains, strict=True)
    ]


def _dealt_out(log_probs: Tensor, found: list[list[Hypothesis]]) -> list[list[list[float]]]:
    """`log_probs (n, U + 1)` of all hypotheses in one batch, split by hypothesis and without padding."""
    scores = iter(log_probs.double().tolist())
    return [[next(scores)[: len(hypothesis.tokens) + 1] for hypothesis in hypotheses] for hypotheses in found]


def in_one_batch(found: list[list[Hypothesis]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """All n hypotheses of all utterances: the utterance that each belongs to `(n,)`, its tokens, padded, `(n, U)`, and
    their number `(n,)`."""
    rows = [b for b, hypotheses in enumerate(found) for _ in hypotheses]
    tokens = [torch.tensor(hypothesis.tokens, dtype=torch.int64) for hypotheses in found for hypothesis in hypotheses]
    lens = [len(each) for each in tokens]
    padded = pad_sequence(tokens, batch_first=True)
    return torch.tensor(rows, device=device), padded.to(device), torch.tensor(lens, device=device)


def label_log_probs(model: Transformer, memory: Tensor, memory_lens: Tensor, Y: Tensor, Y_lens: Tensor) -> Tensor:
    """The decoder's log-probabilities of the tokens of `Y (n, U)`, Y_lens `(n,)`, and of the end: `(n, U + 1)`, zero
    after it; from `memory (n, M, D)`, memory_lens `(n,)`."""
    return _of_labels(model.decoder.teacher_forced(Y, memory, memory_lens), Y, Y_lens, model.config.eos)


def _of_labels(log_probs: Tensor, Y: Tensor, Y_lens: Tensor, eos: int) -> Tensor:
    """The `log_probs (n, U + 1, V)` of the tokens of `Y (n, U)`, Y_lens `(n,)`, and of the end: `(n, U + 1)`."""
    labels = targets(Y, Y_lens, eos)
    # zero where the label is IGNORED, torch's default ignore_index
    return -nn.functional.nll_loss(log_probs.flatten(0, 1), labels.flatten(), reduction="none").view_as(labels)
