"""The one entrance to decoding: features in, hypotheses out."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from asr.decode.beam import beam_search
from asr.decode.ctc import ctc_greedy
from asr.decode.options import DecodeOptions, Hypothesis
from asr.model.transformer import Transformer


@torch.inference_mode()
def search(model: Transformer, X: Tensor, X_lens: Tensor, options: DecodeOptions) -> list[list[Hypothesis]]:
    """The best hypotheses of each utterance of features X `(B, T, d)`, X_lens `(B,)`, best first.

    An utterance too short for one encoder frame gets the empty hypothesis."""
    return search_memory(model, *model.encoder(X, X_lens), options)


@torch.inference_mode()
def search_memory(
    model: Transformer, memory: Tensor, memory_lens: Tensor, options: DecodeOptions
) -> list[list[Hypothesis]]:
    """`search` from the encoder's memory `(B, M, D)`, memory_lens `(B,)`."""
    if options.strategy == "ctc":
        return ctc_greedy(model.ctc_log_probs(memory), memory_lens)
    if options.strategy == "greedy":
        options = replace(options, beam_size=1, ctc_weight=0.0)
    return beam_search(model, memory, memory_lens, options)
