"""The whole model: encoder, CTC head, decoder."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from asr.model.bigram import Bigram
from asr.model.config import ModelConfig
from asr.model.decoder import Decoder
from asr.model.encoder import Encoder


class Output(NamedTuple):
    """What a forward pass gives. T' = U + 1: the input is the prompt (`<sos>`) and y, the target `y <eos>`."""

    log_probs: Tensor  # (B, T', V)
    lens: Tensor  # (B,)
    ctc_log_probs: Tensor | None  # (B, M, V); None: the model has no CTC head
    memory: Tensor  # (B, M, D)
    memory_lens: Tensor  # (B,)
    intermediate: tuple[Tensor, ...] = ()  # CTC log-posteriors (B, M, V) from encoder layers below the last


class Transformer(nn.Module):
    """Features `(B, T, d)` and tokens `(B, U)` to character posteriors, by attention and by CTC."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.ctc = nn.Linear(config.d_model, config.vocab_size) if config.ctc else None
        self.decoder = Decoder(config)
        self.bigram: Bigram | None = None  # of the transcripts that it was trained on

    def forward(self, X: Tensor, X_lens: Tensor, Y: Tensor, Y_lens: Tensor, intermediate: int = 0) -> Output:
        """X `(B, T, d)`, X_lens `(B,)`; Y `(B, U)` without start and end, Y_lens `(B,)`; padding may hold any id.

        `intermediate`: from how many layers below the encoder's last, evenly spaced, CTC is predicted too (if at
        all)."""
        intermediate = intermediate if self.ctc else 0
        outputs: list[Tensor] = []
        memory, memory_lens = self.encoder(X, X_lens, outputs=outputs if intermediate else None)
        depth = self.config.encoder_layers
        chosen = [depth * i // (intermediate + 1) for i in range(1, intermediate + 1)]
        log_probs = self.decoder.teacher_forced(Y, memory, memory_lens)
        between = tuple(self.ctc_log_probs(self.encoder.norm(outputs[layer - 1])) for layer in chosen if layer > 0)
        ctc_log_probs = self.ctc_log_probs(memory) if self.ctc else None
        return Output(log_probs, Y_lens + 1, ctc_log_probs, memory, memory_lens, between)

    def ctc_log_probs(self, memory: Tensor) -> Tensor:
        """CTC log-posteriors `(B, M, V)` of `memory (B, M, D)`, float32."""
        return self.ctc(memory).float().log_softmax(dim=-1)
