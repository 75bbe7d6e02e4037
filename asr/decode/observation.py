"""What went on inside a model while it transcribed: the same encoder pass and search as always, with the attention's
weights kept, and the decoder once along what the search found.

Diagonality is that of Zhang et al. (2021, "On the usefulness of self-attention for automatic speech recognition with
transformers"): 1 where every query attends to its own place, 0 where it attends to what is farthest away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asr.decode.alignment import TimedWord, ctc_alignments, frame_times, timed_words
from asr.decode.recognizer import Recognizer
from asr.model.positions import rotary_angles
from asr.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Observation:
    """One piece of a recording, seen from inside. All tensors are float32 and on the CPU."""

    takes: str  # sound, matrix or text
    unit: str  # of all times: seconds, or tokens of a text
    length: float  # of what was put in, without padding
    frames: tuple[float, float]  # where the encoder's first frame begins and its last ends
    features: Tensor  # (T, d) as the encoder gets them, without what pads to a window; of text (T,) token ids
    source: list[str]  # the tokens of a text; else none
    text: str
    tokens: list[str]  # as the decoder wrote them, and the end
    words: list[TimedWord]
    symbols: list[str]  # of the vocabulary, by id
    ctc: Tensor | None  # (M, V) CTC posteriors
    self_attention: Tensor  # (layers, H, M, M) of the encoder
    cross_attention: Tensor  # (layers, H, T', M) of the decoder
    positions: Tensor  # (M, D): what is added to the encoder's frames; rotary: the cosines of the turns
    key_dim: int


@torch.inference_mode()
def observe(recognizer: Recognizer, samples: np.ndarray) -> Observation:
    """Transcribes samples `(N,)`, a matrix `(T, d)` or token ids `(T,)`, as `Recognizer.recognize` does, and keeps what
    it sees."""
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
    length = len(samples) / (1 if recognizer.takes == "text" else recognizer.rate)
    frames = len(samples) if recognizer.takes == "text" else math.ceil(length * front_end.config.frames_per_second)
    cross = torch.stack([weights[0, :, before:].float().cpu() for weights in cross_attention])
    return Observation(
        takes=recognizer.takes,
        unit="tokens" if recognizer.takes == "text" else "seconds",
        length=length,
        frames=(first, first + M * step),
        features=X[0, :frames].cpu(),
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
    """Mean over the queries of attention weights `(..., L_q, L_k)`: `(...)` in nats; even attention has log L_k."""
    return (weights * -weights.clamp(min=1e-30).log()).sum(dim=-1).mean(dim=-1)


def diagonality(weights: Tensor) -> Tensor:
    """1 - the mean distance of what each query of `(..., L_q, L_k)` attends to from its own place (the queries spread
    evenly over the keys), as a part of the largest distance there: `(...)`."""
    queries, keys = weights.shape[-2:]
    own = torch.linspace(0, keys - 1, queries)[:, None]
    distance = (torch.arange(keys) - own).abs()
    distance = distance / distance.amax(dim=1, keepdim=True).clamp(min=1)
    return 1 - (weights * distance).sum(dim=-1).mean(dim=-1)


def score_spread(weights: Tensor, key_dim: int) -> tuple[Tensor, Tensor]:
    """Deviation over the keys of the scores behind attention weights `(..., L_q, L_k)`, the mean over the queries, with
    1/√d_k and without: `(...)` each.

    Weights are scores up to a constant a query once their logarithm is taken, so that it comes from them alone."""
    seen = weights > 0  # what a window hides, or what is too small for its type, has no score
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
    """A token as one can read it: the space and the beginning of a word as U+2423."""
    return tokenizer.piece(token).replace("\u2581", "\u2423")


def _words(recognizer: Recognizer, tokens: list[int], ctc: Tensor | None, cross: Tensor) -> list[TimedWord]:
    """Each word from where CTC hears its first token to where it hears its last; without CTC, or where its frames are
    too few for what the decoder wrote, around where the decoder looks."""
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
