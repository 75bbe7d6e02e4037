"""Minimum word error rate training (Prabhavalkar et al. 2018): the expected number of word errors is a loss.

The model's current best hypotheses of each utterance share all probability among them; the expected number of word
errors falls as probability moves from the worse hypotheses to the better.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from asr.decode.options import DecodeOptions
from asr.decode.scoring import word_errors
from asr.decode.search import in_one_batch, label_log_probs, search
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Output, Transformer
from asr.training.batches import LABELS
from asr.training.loss import ctc_losses


def expected_word_errors(model: SpeechModel, output: Output, Y: Tensor, Y_lens: Tensor, nbest: int) -> Tensor:
    """The expected word errors of the `nbest` best hypotheses, summed over the utterances of a batch, a scalar; from
    the model's `output` for the labels Y `(B, U)`, Y_lens `(B,)`.

    Hypotheses are found and weighted as in decoding by default: by attention, and by CTC if the model has it."""
    transformer, tokenizer = model.transformer, model.tokenizer
    ctc_weight = DecodeOptions.ctc_weight if transformer.ctc else 0.0
    options = DecodeOptions(beam_size=nbest, nbest=nbest, ctc_weight=ctc_weight)
    training = transformer.training
    transformer.eval()  # hypotheses are found without dropout, but scored with it
    found = search(transformer, output.memory.detach(), output.memory_lens, options)
    transformer.train(training)
    said = [tokenizer.decode(y[:count]) for y, count in zip(Y.tolist(), Y_lens.tolist(), strict=True)]
    errors = [
        torch.tensor([word_errors([text], [tokenizer.decode(h.tokens)]).edits for h in hypotheses], dtype=torch.float)
        for text, hypotheses in zip(said, found, strict=True)
    ]
    log_probs = joint_log_probs(transformer, output, *in_one_batch(found, Y.device), ctc_weight)
    log_probs = pad_sequence(log_probs.split([len(each) for each in errors]), padding_value=-torch.inf)
    return (log_probs.softmax(dim=0) * pad_sequence(errors).to(Y.device)).sum()


def joint_log_probs(
    model: Transformer, output: Output, rows: Tensor, Y: Tensor, Y_lens: Tensor, ctc_weight: float
) -> Tensor:
    """The joint log-probability, by attention and CTC, of the hypotheses Y `(n, U)`, Y_lens `(n,)` for the utterances
    `rows (n,)` of `output`: the score `(n,)` by which the search chooses."""
    room = -Y.shape[1] % LABELS  # for few different shapes
    if model.config.longest_transcript is not None:
        room = min(room, model.config.longest_transcript - Y.shape[1])
    Y = torch.nn.functional.pad(Y, (0, room))
    # by index_select, whose gradient is added row by row
    memory, lens = output.memory.index_select(0, rows), output.memory_lens[rows]
    log_probs = (1 - ctc_weight) * label_log_probs(model, memory, lens, Y, Y_lens).sum(dim=1)
    if not ctc_weight:
        return log_probs
    return log_probs - ctc_weight * ctc_losses(output.ctc_log_probs.index_select(0, rows), Y, lens, Y_lens)
