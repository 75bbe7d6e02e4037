"""The decoder: embedding, positions, a stack of layers with encoder-decoder attention, output layer.

It runs in two ways that agree: over a whole sequence at once (training), or one position at a time with an explicit
`DecoderState` (decoding).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from asr.model.autocast import to_autocast_dtype
from asr.model.cache import AttentionCache
from asr.model.config import ModelConfig
from asr.model.flash_attention import lens_for_kernels
from asr.model.layers import TransformerDecoderLayer, start_near_identity
from asr.model.masks import additive_mask, length_mask
from asr.model.positions import Positions
from asr.model.posteriors import log_posteriors
from asr.text.tokenizer import EOS

IGNORED = -100  # the label of padding, which has no loss


@dataclass(frozen=True)
class DecoderState:
    """Everything that decoding remembers between two steps, for B utterances with W hypotheses each.

    A step uses it up, in place: go on with the state that it returns, or step from a deep copy. Gradients do not pass
    through several steps (they do through `Decoder.teacher_forced`)."""

    past: AttentionCache
    cross: list[tuple[Tensor, Tensor]]  # per layer: the memory's keys, values (B, H, M, d)
    memory_mask: Tensor  # (B, 1, 1, M), additive

    def reorder(self, parents: Tensor) -> DecoderState:
        """The state in which hypothesis w of utterance b continues hypothesis `parents[b, w]`, `(B, W)`."""
        return replace(self, past=self.past.reorder(parents))

    def compact(self) -> DecoderState:
        """The same state in less memory, by `AttentionCache.compact`."""
        return replace(self, past=self.past.compact())


class TokenStack(nn.Module):
    """Base of the decoder and the language model: embedding, positions, a stack of layers, output layer."""

    def __init__(self, config: ModelConfig, layer: Callable[[ModelConfig], nn.Module]):
        super().__init__()
        self.config = config
        self.register_buffer("prompt", torch.tensor(config.prompt), persistent=False)
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=config.d_model**-0.5)
        self.positions = Positions(config, config.positions_of_decoder)
        self.layers = nn.ModuleList(layer(config) for _ in range(config.decoder_layers))
        self.norm = nn.LayerNorm(config.d_model) if config.norm_first else nn.Identity()
        if config.norm_first:
            start_near_identity(self.layers)
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=config.output_bias)
        if config.output_bias:
            nn.init.zeros_(self.output.bias)
        if config.tie_output:
            self.output.weight = self.embedding.weight

    def prompted(self, Y: Tensor) -> Tensor:
        """The input that predicts `Y (B, U)`: the prompt of P tokens followed by `Y`, `(B, P + U)`."""
        return torch.cat([self.prompt.expand(len(Y), -1), Y], dim=1)

    def teacher_forced(self, Y: Tensor, *memory: Tensor) -> Tensor:
        """Log-posteriors `(B, U + 1, V)` of every token of `Y (B, U)` and of the token after the last one, float32; a
        decoder also needs its memory and the memory's lengths."""
        return self(self.prompted(Y), *memory)[:, len(self.config.prompt) - 1 :]

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeds whole sequences: `(B, T')` -> `(B, T', D)`."""
        return self.positions(self.embedding(tokens))

    def embed_newest(self, tokens: Tensor, position: int) -> Tensor:
        """Embeds the newest token of each hypothesis, `(B, W)`, all at `position` -> `(B, W, D)`."""
        return self.positions(self.embedding(tokens.flatten())[:, None], position).view(*tokens.shape, -1)

    def log_posteriors(self, x: Tensor) -> Tensor:
        """`(..., D)` -> `(..., V)`, float32."""
        return log_posteriors(self.output, self.norm(x))


class Decoder(TokenStack):
    """Tokens and memory to log-posteriors of the next token."""

    def __init__(self, config: ModelConfig):
        super().__init__(config, TransformerDecoderLayer)

    def forward(self, Y_in: Tensor, memory: Tensor, memory_lens: Tensor, weights: list[Tensor] | None = None) -> Tensor:
        """Log-posteriors `(B, T', V)` of the token after each token of `Y_in (B, T')`, float32.

        `weights` collects each layer's attention to the memory `(B, H, T', M)`."""
        memory, size = to_autocast_dtype(memory), memory.shape[1]
        memory_mask = length_mask(memory_lens, size)
        kernel_lens = lens_for_kernels(memory_lens)
        x = self.embed(Y_in)
        for layer in self.layers:
            x = layer(x, memory, memory_mask, weights, kernel_lens)
        return self.log_posteriors(x)

    def start(self, memory: Tensor, memory_lens: Tensor, width: int) -> DecoderState:
        """The state before the first step, `width` hypotheses per utterance; the memory is projected here, once."""
        # each step reads all of the memory: the numbers of a head are contiguous, not those of a frame
        cross = [tuple(x.contiguous() for x in layer.cross_attention.project(memory)) for layer in self.layers]
        nothing = (memory_lens == 0)[:, None, None, None]  # no memory to attend to: attention gives zeros
        cross = [(K, V.masked_fill(nothing, 0.0)) for K, V in cross]
        like = cross[0][0]  # under autocast the keys have another type than the memory
        past = AttentionCache.empty(self.config, len(self.layers), memory.shape[0], width, like)
        return DecoderState(past, cross, additive_mask(length_mask(memory_lens, memory.shape[1]), like.dtype))

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """Log-posteriors `(B, W, V)` of the token after each of `tokens (B, W)`, the newest of their hypotheses."""
        past, newest = state.past.next_position()
        x = self.embed_newest(tokens, newest.position)
        for layer, layer_past, cross in zip(self.layers, past.layers, state.cross, strict=True):
            x = layer.step(x, layer_past, newest, cross, state.memory_mask)
        return self.log_posteriors(x), replace(state, past=past)


def targets(Y: Tensor, Y_lens: Tensor, eos: int = EOS) -> Tensor:
    """The labels `y <eos>`, padded with `IGNORED`: `(B, U)` -> `(B, U + 1)`."""
    Y = torch.nn.functional.pad(Y, (0, 1))
    position = torch.arange(Y.shape[1], device=Y.device)
    Y = Y.masked_fill(position == Y_lens[:, None], eos)
    return Y.masked_fill(position > Y_lens[:, None], IGNORED)
