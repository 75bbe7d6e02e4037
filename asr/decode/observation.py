"""What goes on inside a model while it transcribes: the usual encoder pass and search, with the attention weights
kept, and one pass of the decoder over what the search found.

Diagonality is that of Zhang et al. (2021, "On the usefulness of self-attention for automatic speech recognition with
transformers"): 1 if every query attends to its own place, 0 if it attends to the place farthest away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asr.decode.alignment import TimedWord, ctc_alignments, frame_times, timed_words
from asr.decode.precision import in_own_precision
from asr.decode.recognizer import Recognizer
from asr.model.positions import rotary_angles
from asr.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Observation:
    """One piece of a recording, seen from inside. All tensors are float32 (token ids aside) and on the CPU."""

    takes: str  # sound, matrix or text
    unit: str  # of all times: seconds, or tokens of a text
    length: float  # of the input, without padding
    frames: tuple[float, float]  # where the encoder's first frame starts and its last ends
    features: Tensor  # (T, d) input of the encoder, without the padding to a window; for text (T,) token ids
    source: list[str]  # tokens of the input, if it is text; else empty
    text: str
    tokens: list[str]  # that the decoder wrote, and the end
    words: list[TimedWord]
    symbols: list[str]  # of the vocabulary, by id
    ctc: Tensor | None  # (M, V) CTC posteriors
    self_attention: Tensor  # (layers, H, M, M) of the encoder
    cross_attention: Tensor  # (layers, H, T', M) of the decoder
    positions: Tensor  # (M, D): what is added to the encoder's frames; rotary: the cosines of the angles
    key_dim: int


@in_own_precision
def observe(recognizer: Recognizer, samples: np.ndarray) -> Observation:
    """Transcribes samples `(N,)`, a matrix `(T, d)` or token ids `(T,)`, as `Recognizer.recognize` does, and keeps what
    it observes."""
    transformer, tokenizer = recognizer.model.transformer, recognizer.model.tokenizer
    front_end = recognizer.model.front_end
    X, X_lens = recognizer.features([samples])
    self_attention: list[Tensor] = []
    cross_attention: list[Tensor] = []
    memory, lens = transformer.encoder(X, X_lens, self_attention)
    best = recognizer.said([samples], recognizer.search(memory, lens))[0][0]
    decoder = transformer.decoder
    Y = torch.tensor([best.tokens], dtype=torch.int64, device=memory.device)
    decoder(decoder.prompted(Y), memory, lens, cross_attention)
    before = len(transformer.config.prompt) - 1
    ctc = transformer.ctc_log_probs(memory)[0].float().cpu() if transformer.ctc else None
    M = memory.shape[1]
    first, step = frame_times(recognizer.model)
    rate, per_second = (1, 1) if recognizer.takes == "text" else (recognizer.rate, front_end.config.frames_per_second)
    cross = torch.stack([weights[0, :, before:].float().cpu() for weights in cross_attention])
    return Observation(
        takes=recognizer.takes,
        unit="tokens" if recognizer.takes == "text" else "seconds",
        length=len(samples) / rate,
        frames=(first, first + M * step),
        features=X[0, : math.ceil(len(samples) * per_second / rate)].cpu(),
        source=[_symbol(tokenizer, int(token)) for token in samples] if recognizer.takes == "text" else [],
        text=tokenizer.decode(best.tokens).strip(),
        tokens=[*(_symbol(tokenizer, token) for token in best.tokens), "<eos>"],
        words=_words(recognizer, best.tokens, ctc, cross),
        symbols=[_symbol(tokenizer, token) for token in range(len(tokenizer))],
        ctc=None if ctc is None else ctc.exp(),
        self_attention=torch.stack([weights[0].float().cpu() for weights in self_attention]),
        cross_attention=cross,
        positions=_positions(transformer, M),
        key_dim=transformer.config.key_dim,
    )


def entropy(weights: Tensor) -> Tensor:
    """Entropy of attention weights `(..., L_q, L_k)`, mean over the queries: `(...)` in nats; log L_k if uniform."""
    return (weights * -weights.clamp(min=1e-30).log()).sum(dim=-1).mean(dim=-1)


def diagonality(weights: Tensor) -> Tensor:
    """1 - the mean distance from each query's own place (the queries spread evenly over the keys) to what it attends to
    in weights `(..., L_q, L_k)`, as a fraction of the largest distance from there: `(...)`."""
    queries, keys = weights.shape[-2:]
    own = torch.linspace(0, keys - 1, queries)[:, None]
    distance = (torch.arange(keys) - own).abs()
    distance = distance / distance.amax(dim=1, keepdim=True).clamp(min=1)
    return 1 - (weights * distance).sum(dim=-1).mean(dim=-1)


def score_spread(weights: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """The standard deviation over the keys of the scores behind attention weights `(..., L_q, L_k)`, mean over the
    queries, with 1/√d_k and without: `(...)` each.

    The logarithms of the weights are the scores up to a constant per query, so the weights are all it needs."""
    seen = weights > 0  # keys that a window hides, or with weights too small for their type, have no score
    count = seen.sum(dim=-1).clamp(min=2)
    scores = weights.clamp(min=1e-30).log().masked_fill(~seen, 0.0)
    mean = scores.sum(dim=-1, keepdim=True) / count[..., None]
    spread = ((scores - mean).masked_fill(~seen, 0.0).square().sum(dim=-1) / (count - 1)).sqrt().mean(dim=-1)
    return spread, spread * math.sqrt(key_dim)


def unscaled(weights: Tensor, key_dim: int) -> Tensor:
    """The weights that the same queries and keys would give without 1/√d_k."""
    scores = weights.clamp(min=1e-30).log() * math.sqrt(key_dim)
    return scores.masked_fill(weights == 0, torch.finfo(scores.dtype).min).softmax(dim=-1)


def _symbol(tokenizer: Tokenizer, token: int) -> str:
    """A token in readable form: U+2423 for a space and the start of a word."""
    return tokenizer.piece(token).replace("\u2581", "\u2423")


def _words(recognizer: Recognizer, tokens: list[int], ctc: Tensor | None, cross: Tensor) -> list[TimedWord]:
    """The words, each from where CTC hears its first token to where it hears its last; without CTC, or with too few
    frames for what the decoder wrote, around where the decoder looks."""
    count = cross.shape[-1]
    looks = (cross.mean(dim=(0, 1)) * torch.arange(count)).sum(dim=-1).tolist()
    spans = [(look, look + 1) for look in looks]
    if ctc is not None:
        spans = ctc_alignments(ctc[None], torch.tensor([count]), [tokens])[0] or spans
    return timed_words(recognizer.model, tokens, spans)


def _positions(transformer, length: int) -> Tensor:
    positions = transformer.encoder.positions
    if positions.kind != "rotary":
        return positions.vectors(0, length, transformer.decoder.prompt.device).float().cpu()
    return rotary_angles(torch.arange(length), transformer.config.key_dim).cos()
