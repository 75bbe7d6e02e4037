"""The parts of a model that become ONNX graphs (`asr.decode.onnx`): tensors to tensors, for batches of any size."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asr.audio.features import SILENCE
from asr.decode.ctc import hears_something
from asr.model.cache import StepPosition
from asr.model.masks import additive_mask, length_mask
from asr.model.speech_model import SpeechModel


def takes(model: SpeechModel) -> str:
    """The input of the encoder's graph: the same as the model's, but matrices instead of audio for Kaldi's features."""
    config = model.front_end.config
    return "matrix" if config.kind == "kaldi" else config.takes


class EncoderGraph(nn.Module):
    """A batch of audio (or of matrices or text) to the keys and values of every decoder layer."""

    def __init__(self, model: SpeechModel):
        super().__init__()
        self.takes = takes(model)
        self.front_end = deepcopy(model.front_end)
        self.transformer = model.transformer
        config, encoder = model.front_end.config, model.transformer.encoder
        least = getattr(encoder.subsampling, "reach", 1) - 1  # frames that one output frame sees, without the last
        self.padding: tuple[int, ...] = (0, 0, 0, least) if self.takes == "matrix" else (0, 0)
        if self.takes == "matrix":
            self.front_end.config = replace(config, kind="matrix")
        elif self.takes == "sound":
            self.front_end.stft = Waves(self.front_end.stft)
            self.front_end.mel_scale = Bands(self.front_end.mel_scale)
            if config.kind == "log_mel":  # whisper pads by itself, and its positions have an end
                self.padding = (0, least * self.front_end.hop + self.front_end.window)

    def forward(self, inputs: Tensor, lens: Tensor) -> tuple[Tensor, ...]:
        """`inputs` `(B, N)` samples or tokens, or `(B, T, d)` features before normalisation, `lens (B,)` -> memory_lens
        `(B,)`, 0 where nothing is heard; keys `(L, B, H, M, d_k)` and values `(L, B, H, M, d_v)` of L decoder layers;
        CTC log-posteriors `(B, M, V)`, if the model has CTC."""
        X, X_lens = self.front_end(nn.functional.pad(inputs, self.padding), lens)
        if self.takes == "sound":
            X_lens = X_lens.masked_fill(inputs.abs().amax(dim=1) < SILENCE, 0)
        memory, memory_lens = self.transformer.encoder(X, X_lens, weights=[])  # weights: no fused kernels
        keys, values = zip(*self.transformer.decoder.start(memory, memory_lens, width=1).cross, strict=True)
        cross = torch.stack(keys), torch.stack(values)
        if self.transformer.ctc is None:
            return memory_lens, *cross
        log_probs = self.transformer.ctc_log_probs(memory)
        return memory_lens.masked_fill(~hears_something(log_probs, memory_lens), 0), *cross, log_probs


class Spectrum(NamedTuple):
    real: Tensor
    imag: Tensor


class Waves(nn.Module):
    """torchaudio's Spectrogram as a convolution with cosines and sines, which every runtime supports."""

    def __init__(self, stft: nn.Module):
        super().__init__()
        size = stft.n_fft
        turns = torch.outer(torch.arange(size // 2 + 1), torch.arange(size)).double() / size
        waves = torch.cat([(2 * math.pi * turns).cos(), -(2 * math.pi * turns).sin()]) * stft.window.double()
        self.register_buffer("waves", waves[:, None].float())
        self.hop, self.edge = stft.hop_length, size // 2 if stft.center else 0

    def forward(self, samples: Tensor) -> Spectrum:
        """`(B, N)` -> `(B, F, T)`."""
        samples = samples[:, None]
        if self.edge:
            samples = nn.functional.pad(samples, (self.edge, self.edge), mode="reflect")
        return Spectrum(*nn.functional.conv1d(samples, self.waves, stride=self.hop).chunk(2, dim=1))


class Bands(nn.Module):
    """torchaudio's MelScale as a convolution, not a product that int8 would quantise: powers vary too widely."""

    def __init__(self, mel_scale: nn.Module):
        super().__init__()
        self.register_buffer("bands", mel_scale.fb.T[:, :, None].contiguous())

    def forward(self, power: Tensor) -> Tensor:
        """`(B, F, T)` -> `(B, d, T)`."""
        return nn.functional.conv1d(power, self.bands)


class DecoderGraph(nn.Module):
    """`Decoder.step` as a graph. As in `AttentionCache`, keys and values stay in the slots where they were written; a
    search reorders only which slots each hypothesis sees."""

    def __init__(self, model: SpeechModel):
        super().__init__()
        self.decoder = model.transformer.decoder

    def forward(
        self,
        tokens: Tensor,
        past_keys: Tensor,
        past_values: Tensor,
        hidden: Tensor,
        cross_keys: Tensor,
        cross_values: Tensor,
        memory_lens: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The newest `tokens (B, W)` of W hypotheses per utterance; S slots of earlier tokens, W per step: past_keys
        `(L, B, H, S, d_k)`, past_values `(L, B, H, S, d_v)`, hidden `(B, W, S)`, True where a slot holds no ancestor of
        the hypothesis; and the encoder's outputs -> log-posteriors `(B, W, V)` of the next token, and keys, values and
        hidden with S + W slots."""
        W, S = tokens.shape[1], past_keys.shape[3]
        hidden = torch.cat([hidden, ~torch.eye(W, dtype=torch.bool).expand(hidden.shape[0], -1, -1)], dim=2)
        newest = StepPosition(S // W, slice(S, S + W), additive_mask(hidden[:, None], past_keys.dtype))
        keys, values = ([nn.functional.pad(x, (0, 0, 0, W)) for x in past] for past in (past_keys, past_values))
        memory_mask = additive_mask(length_mask(memory_lens, cross_keys.shape[3]), cross_keys.dtype)
        x = self.decoder.embed_newest(tokens, newest.position)
        each = zip(self.decoder.layers, keys, values, cross_keys, cross_values, strict=True)
        for layer, *past, cross_key, cross_value in each:
            x = layer.step(x, tuple(past), newest, (cross_key, cross_value), memory_mask)
        return self.decoder.log_posteriors(x), torch.stack(keys), torch.stack(values), hidden
