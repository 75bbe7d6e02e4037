"""The whole model: encoder, CTC head, decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asr.model.bigram import Bigram
from asr.model.config import ModelConfig
from asr.model.decoder import Decoder
from asr.model.encoder import Encoder
from asr.model.posteriors import log_posteriors

# what goes with the vocabulary: fields of the config besides its size, and how the names of weights begin
CONFIG_OF_THE_VOCABULARY = ("prompt", "eos", "suppressed", "suppressed_first", "first_timestamp", "ctc")
OF_THE_VOCABULARY = ("ctc.", "decoder.embedding.", "decoder.output.", "encoder.subsampling.table.")


class Output(NamedTuple):
    """The result of a forward pass. T' = U + 1: the input is the prompt (`<sos>`) and y, the target is `y <eos>`."""

    log_probs: Tensor  # (B, T', V)
    lens: Tensor  # (B,)
    # CTC log-posteriors (n, B, M, V) from the encoder's last layer and from the requested layers below it; None: the
    # model has no CTC head
    every_ctc: Tensor | None
    memory: Tensor  # (B, M, D)
    memory_lens: Tensor  # (B,)

    @property
    def ctc_log_probs(self) -> Tensor | None:
        """CTC log-posteriors from the last layer, `(B, M, V)`."""
        return None if self.every_ctc is None else self.every_ctc[0]


class Transformer(nn.Module):
    """Features `(B, T, d)` and tokens `(B, U)` to token posteriors, by attention and by CTC."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.ctc = nn.Linear(config.d_model, config.vocab_size) if config.ctc else None
        self.decoder = Decoder(config)
        self.bigram: Bigram | None = None  # of the transcripts that the model was trained on

    def forward(self, X: Tensor, X_lens: Tensor, Y: Tensor, Y_lens: Tensor, intermediate: int = 0) -> Output:
        """X `(B, T, d)`, X_lens `(B,)`; Y `(B, U)` without start and end, Y_lens `(B,)`; padding may hold any id.

        `intermediate`: the number of layers below the encoder's last, evenly spaced, whose CTC posteriors are computed,
        too (if the model has a CTC head)."""
        intermediate = intermediate if self.ctc else 0
        outputs: list[Tensor] = []
        memory, memory_lens = self.encoder(X, X_lens, outputs=outputs if intermediate else None)
        depth = self.config.encoder_layers
        chosen = sorted({depth * i // (intermediate + 1) for i in range(1, intermediate + 1)} - {0})
        log_probs = self.decoder.teacher_forced(Y, memory, memory_lens)
        every_ctc = None
        if self.ctc:
            between = (self.encoder.norm(outputs[layer - 1]) for layer in chosen)
            every_ctc = self.ctc_log_probs(torch.stack([memory, *between]))
        return Output(log_probs, Y_lens + 1, every_ctc, memory, memory_lens)

    def set_window(self, left: int, right: int) -> None:
        """Limits the encoder's self-attention to `left` frames before and `right` frames after each frame, exactly as
        in a model that was built that way."""
        self.config = self.encoder.config = replace(self.config, attention_left=left, attention_right=right)
        for layer in self.encoder.layers:
            layer.attention.window = self.config.attention_window

    def ctc_log_probs(self, memory: Tensor) -> Tensor:
        """CTC log-posteriors `(..., V)` of `memory (..., D)`, float32."""
        return log_posteriors(self.ctc, memory)
