"""The shape of a model: one validated dataclass, saved with the weights, from which `Transformer` builds itself; and
the options of its pre-training."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from asr.text.tokenizer import BLANK, EOS, SOS

if TYPE_CHECKING:
    from torch import Tensor

CHOICES = {
    "encoder": ("transformer", "conformer"),
    "activation": ("relu", "gelu", "silu"),
    "positions": ("sinusoidal", "sinusoidal_halves", "learned", "rotary"),
    "decoder_positions": (None, "sinusoidal", "sinusoidal_halves", "learned", "rotary"),
    "subsampler": ("conv2d", "conv1d", "conv1d_glu", "linear", "embedding"),
    "subsampling": (1, 2, 4, 6, 8),
    "attention_init": ("xavier_uniform", "xavier_normal"),
}
POSITIVE = (
    "input_dim", "d_model", "encoder_layers", "decoder_layers", "num_heads", "d_k", "d_v", "ffn_dim",
    "subsampling_channels", "max_positions",
)  # fmt: skip
WEIGHT_TYPES = ("float32", "float16", "int8")  # of weights on disk


@dataclass(frozen=True)
class ModelConfig:
    """A Transformer encoder-decoder with a front end (a convolutional subsampler, for sound) and a CTC head.

    Other toolkits' models are instances of it, too (`asr.model.foreign`)."""

    vocab_size: int = 32  # V: blank, unknown, start and end included
    input_dim: int = 80  # d: width of the features
    d_model: int = 256  # D
    encoder: str = "transformer"  # kind of encoder layer: transformer or conformer
    encoder_layers: int = 12
    decoder_layers: int = 6
    num_heads: int = 4  # H
    d_k: int | None = None  # width of a head's queries and keys; None: D / H
    d_v: int | None = None  # width of a head's values; None: D / H
    # encoder frames before and after a frame that it attends to; None: all. With both, the encoder's time and memory
    # grow linearly with the length of a recording
    attention_left: int | None = None
    attention_right: int | None = None
    attention_bias: bool = True
    key_bias: bool = True  # whether keys have one, where attention has biases; not in Whisper
    attention_init: str = "xavier_uniform"  # of whole projections; xavier_normal: head by head
    ffn_dim: int = 2048
    activation: str = "relu"  # of the feed-forward layers: relu, gelu or silu
    norm_first: bool = True  # pre-norm, with one norm after each stack; False: post-norm, as in the paper
    positions: str = "sinusoidal"  # sinusoidal, sinusoidal_halves (all sines first), learned or rotary
    decoder_positions: str | None = None  # the decoder's; None: the same
    first_position: int = 0  # of sinusoids
    max_positions: int = 5000  # length of the learned table
    scale_embedding: bool = True  # embeddings and subsampled features times sqrt(D) before the positions are added
    tie_output: bool = True  # the decoder's output layer shares its weights with the embedding
    output_bias: bool = True
    ctc: bool = True  # whether there is a CTC head
    prompt: tuple[int, ...] = (SOS,)  # tokens that the decoder reads before the first one
    eos: int = EOS  # the token that ends a transcript
    suppressed: tuple[int, ...] = (BLANK, SOS)  # tokens that the decoder never writes
    suppressed_first: tuple[int, ...] = ()  # tokens that never begin a transcript
    first_timestamp: int | None = None  # token of 0 s; it and all after it are times, if the decoder writes times
    # conv2d: over time and frequency; conv1d: over time, GELU, by 2; conv1d_glu: over time, by 4; linear: each frame by
    # itself, by 1; embedding: of token ids, by 1
    subsampler: str = "conv2d"
    subsampling: int = 4  # frames per encoder frame: 2, 4, 6 or 8; 1 with linear and embedding
    # maximum number of tokens per encoder frame; with CTC no more than 1
    tokens_per_frame: float = 1.0
    subsampling_channels: int = 64
    conv_kernel: int = 15  # of the Conformer's depthwise convolution; odd
    dropout: float = 0.1

    def __post_init__(self):
        for name in ("prompt", "suppressed", "suppressed_first"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"model.{name}: {getattr(self, name)!r} is not one of {', '.join(map(str, choices))}")
        for name in POSITIVE:
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"model.{name} must be positive, not {getattr(self, name)}")
        if self.vocab_size < 5:
            raise ValueError("model.vocab_size: four special symbols and at least one more are needed")
        if None in (self.d_k, self.d_v) and self.d_model % self.num_heads:
            raise ValueError(f"model.d_model={self.d_model} is not divisible by model.num_heads={self.num_heads}")
        if "rotary" in (self.positions, self.positions_of_decoder) and self.key_dim % 2:
            raise ValueError(f"model.positions=rotary rotates pairs: d_k must be even, not {self.key_dim}")
        if self.d_model % 2 and any("sinus" in kind for kind in (self.positions, self.positions_of_decoder)):
            raise ValueError(f"model.positions=sinusoidal needs an even model.d_model, not {self.d_model}")
        factors = {"conv2d": (2, 4, 6, 8), "conv1d": (2,), "conv1d_glu": (4,)}.get(self.subsampler, (1,))
        if self.subsampling not in factors:
            choices = " or ".join(map(str, factors))
            raise ValueError(
                f"model.subsampling={self.subsampling}: model.subsampler={self.subsampler} is by {choices}"
            )
        if None in (self.attention_left, self.attention_right):
            if self.attention_left != self.attention_right:
                raise ValueError("model.attention_left and model.attention_right: both, or neither")
        elif min(self.attention_left, self.attention_right) < 0 or self.attention_left + self.attention_right == 0:
            raise ValueError(
                f"model.attention_left={self.attention_left}, model.attention_right={self.attention_right}:"
                " a window needs at least one frame besides its own"
            )
        if not 0 < self.tokens_per_frame < math.inf or (self.ctc and self.tokens_per_frame > 1):
            raise ValueError(
                "model.tokens_per_frame must be positive and finite, and more than 1 only with model.ctc=false"
            )
        if not self.prompt:
            raise ValueError("model.prompt must name at least one token")
        if self.ctc and self.eos != EOS:
            raise ValueError(f"model.eos must be {EOS} where there is a CTC head")
        for token in (*self.prompt, self.eos, *self.suppressed, *self.suppressed_first, self.first_timestamp or 0):
            if not 0 <= token < self.vocab_size:
                raise ValueError(f"model: the special token {token} is not one of model.vocab_size={self.vocab_size}")
        if self.conv_kernel < 1 or self.conv_kernel % 2 == 0:
            raise ValueError(f"model.conv_kernel must be odd and positive, not {self.conv_kernel}")
        if self.subsampler == "conv1d_glu" and self.subsampling_channels % 2:
            raise ValueError(f"model.subsampling_channels: a GLU halves them, and {self.subsampling_channels} is odd")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"model.dropout must lie in [0, 1), not {self.dropout}")

    @property
    def key_dim(self) -> int:
        return self.d_k or self.d_model // self.num_heads

    @property
    def value_dim(self) -> int:
        return self.d_v or self.d_model // self.num_heads

    @property
    def attention_window(self) -> tuple[int, int] | None:
        """Of the encoder's self-attention: frames before, frames after."""
        return None if self.attention_left is None else (self.attention_left, self.attention_right)

    @property
    def positions_of_decoder(self) -> str:
        return self.decoder_positions or self.positions

    @property
    def longest_transcript(self) -> int | None:
        """How many tokens a transcript can have for the decoder's positions; None: any number."""
        return self.max_positions - len(self.prompt) if self.positions_of_decoder == "learned" else None

    def most_tokens(self, memory_lens: Tensor) -> Tensor:
        """How many tokens a transcript can have, of memories of `memory_lens (B,)` frames."""
        most = (memory_lens * self.tokens_per_frame).ceil().long()
        return most if self.longest_transcript is None else most.clamp(max=self.longest_transcript)

    @classmethod
    def preset(cls, name: str, **overrides: Any) -> ModelConfig:
        """One of `PRESETS`, with fields overridden. Raises ValueError naming the choices."""
        if name not in PRESETS:
            raise ValueError(f"model: {name!r} is not one of {', '.join(PRESETS)}")
        return replace(PRESETS[name], **overrides)


PRESETS = {
    "tiny": ModelConfig(
        encoder="conformer",
        d_model=96,
        encoder_layers=4,
        decoder_layers=1,
        ffn_dim=384,
        activation="silu",
        subsampling_channels=32,
    ),
    "small": ModelConfig(),
    "base": ModelConfig(d_model=512, num_heads=8, encoder_layers=6, decoder_layers=6, norm_first=False),
    "conformer-s": ModelConfig(
        encoder="conformer", d_model=144, encoder_layers=8, decoder_layers=3, ffn_dim=576, activation="silu"
    ),
    "conformer-m": ModelConfig(
        encoder="conformer", d_model=256, encoder_layers=12, decoder_layers=4, ffn_dim=1024, activation="silu"
    ),
}


@dataclass(frozen=True)
class MaskedPredictionConfig:
    """What of the features is hidden, and which codes of it an encoder predicts (`asr.model.best_rq`)."""

    codebooks: int = 4
    codes: int = 256  # per codebook
    code_dim: int = 16  # width to which features are projected before the search for the nearest code
    mask_start: float = 0.015  # probability that a masked span starts at a frame of the features
    mask_frames: int = 24  # length of a span; spans may overlap
    mask_noise: float = 0.1  # standard deviation of the normal noise in place of masked features, which are normalised
    visible_weight: float = 1.0  # weight of the loss of unmasked frames, relative to that of masked frames

    def __post_init__(self):
        if min(self.codebooks, self.code_dim, self.mask_frames) < 1 or self.codes < 2:
            raise ValueError("masked_prediction: codebooks, code_dim and mask_frames must be at least 1, codes 2")
        if min(self.mask_noise, self.visible_weight) < 0:
            raise ValueError("masked_prediction: mask_noise and visible_weight must not be negative")
        if not 0 < self.mask_start < 1:
            raise ValueError(f"masked_prediction.mask_start must lie in (0, 1), not {self.mask_start}")
