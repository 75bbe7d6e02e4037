"""The whole model: encoder, CTC head, decoder."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from asr.model.config import ModelConfig
from asr.model.decoder import Decoder
from asr.model.encoder import Encoder
from asr.text.tokenizer import SOS


class Output(NamedTuple):
    """What a forward pass gives. T' = U + 1: the input is `<sos> y`, the target `y <eos>`."""

    log_probs: Tensor  # (B, T', V)
    lens: Tensor  # (B,)
    ctc_log_probs: Tensor  # (B, M, V)
    memory_lens: Tensor  # (B,)


class Transformer(nn.Module):
    """Features `(B, T, d)` and tokens `(B, U)` to character posteriors, by attention and by CTC."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.ctc = nn.Linear(config.d_model, config.vocab_size)
        self.decoder = Decoder(config)

    def forward(self, X: Tensor, X_lens: Tensor, Y: Tensor, Y_lens: Tensor) -> Output:
        """X `(B, T, d)`, X_lens `(B,)`; Y `(B, U)` without start and end, Y_lens `(B,)`; padding may hold any id."""
        memory, memory_lens = self.encoder(X, X_lens)
        Y_in = nn.functional.pad(Y, (1, 0), value=SOS)
        log_probs = self.decoder(Y_in, memory, memory_lens)
        return Output(log_probs, Y_lens + 1, self.ctc_log_probs(memory), memory_lens)

    def ctc_log_probs(self, memory: Tensor) -> Tensor:
        """CTC log-posteriors `(B, M, V)` of `memory (B, M, D)`, float32."""
        return self.ctc(memory).float().log_softmax(dim=-1)
