"""Pre-training of an encoder on audio only: BEST-RQ (Chiu et al. 2022, "Self-supervised learning with random-projection
quantizer for speech recognition").

Spans of the features are replaced by noise, and the encoder predicts what was there: not the features themselves, but
the codes that a quantiser assigns to them, which is drawn at random and never trained. Each of several codebooks is a
prediction task of its own (Zhang et al. 2023, Google USM).

Two things differ from the paper, based on measurements with an hour of speech (docs/pretraining.md): the quantiser gets
the mean of an encoder frame's features instead of their concatenation, of which hardly any two are alike; and the codes
of visible frames are predicted, too, an option of HuBERT (Hsu et al. 2021, section 3.3): otherwise the encoder predicts
nothing but the codes' frequencies for thousands of updates.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asr.model.config import MaskedPredictionConfig
from asr.model.encoder import Encoder


class RandomProjectionQuantizer(nn.Module):
    """Features to codes: a random projection, then the nearest of random code vectors, all scaled to length 1."""

    def __init__(self, width: int, config: MaskedPredictionConfig):
        super().__init__()
        shape = (config.codebooks, width, config.code_dim)
        self.register_buffer("projection", nn.init.xavier_uniform_(torch.empty(shape)))
        codes = torch.randn(config.codebooks, config.codes, config.code_dim)
        self.register_buffer("codes", nn.functional.normalize(codes, dim=2))

    def forward(self, x: Tensor) -> Tensor:
        """`x (..., width)` -> codes `(..., codebooks)`."""
        with torch.autocast(x.device.type, enabled=False):
            # the nearest of vectors of length 1 is the one with the largest dot product, whatever the length of x
            products = torch.einsum("...w,nwc,nkc->...nk", x.float(), self.projection, self.codes)
        return products.argmax(dim=-1)


class Prediction(NamedTuple):
    """The results for the encoder frames of a batch that are fully masked, and for those that are not masked at all."""

    masked_loss: Tensor  # cross-entropy per code, in nats
    visible_loss: Tensor
    accuracy: Tensor  # share of the masked frames' codes that were predicted as the most probable
    frames: Tensor  # how many masked frames there were


class MaskedPrediction(nn.Module):
    """An encoder in pre-training, with masks, the quantiser and a linear layer that predicts codes."""

    def __init__(self, encoder: Encoder, dim: int, config: MaskedPredictionConfig):
        """`dim`: d, the width of the features."""
        super().__init__()
        self.config = config
        self.encoder = encoder
        self.factor = encoder.subsampling.factor
        if config.mask_frames < self.factor:
            raise ValueError(
                f"masked_prediction.mask_frames={config.mask_frames} never hides a whole encoder frame of {self.factor}"
            )
        self.quantizer = RandomProjectionQuantizer(dim, config)
        self.output = nn.Linear(encoder.config.d_model, config.codebooks * config.codes)

    def forward(self, X: Tensor, X_lens: Tensor) -> Prediction:
        """Normalised features X `(B, T, d)`, X_lens `(B,)`. A new mask is drawn at each call."""
        mask = self.draw_mask(X)
        memory, lens = self.encoder(self.masked(X, mask), X_lens)
        length = memory.shape[1]
        codes = self.quantizer(self.middle(X, length).mean(dim=2))
        real = torch.arange(length, device=X.device) < lens[:, None]
        covered = self.middle(mask[:, :, None], length)[..., 0]
        hidden, visible = covered.all(dim=2) & real, ~covered.any(dim=2) & real
        log_probs = self.output(memory).float().unflatten(2, (self.config.codebooks, -1)).log_softmax(dim=3)
        likelihood = log_probs.gather(3, codes[..., None])[..., 0].mean(dim=2)
        right = (log_probs.argmax(dim=3) == codes).float().mean(dim=2)
        return Prediction(-_mean(likelihood, hidden), -_mean(likelihood, visible), _mean(right, hidden), hidden.sum())

    def draw_mask(self, X: Tensor) -> Tensor:
        """`(B, T)`, True = masked: spans of `mask_frames` from frames drawn with probability `mask_start`."""
        starts = torch.rand(X.shape[:2], device=X.device) < self.config.mask_start
        reach = self.config.mask_frames - 1
        padded = nn.functional.pad(starts.float(), (reach, 0))
        return nn.functional.max_pool1d(padded[:, None], reach + 1, stride=1)[:, 0] > 0

    def masked(self, X: Tensor, mask: Tensor) -> Tensor:
        """X with the frames in `mask (B, T)` replaced by noise."""
        noise = torch.randn(X.shape, device=X.device, dtype=X.dtype) * self.config.mask_noise
        return torch.where(mask[:, :, None], noise, X)

    def middle(self, X: Tensor, length: int) -> Tensor:
        """The frames in the middle of each encoder frame's receptive field: `(B, T, d)` -> `(B, length, s, d)`, with
        subsampling by s; zeros where a padded convolution begins before the first frame, or ends after the last."""
        first = math.floor(self.encoder.subsampling.centre - (self.factor - 1) / 2)
        X = nn.functional.pad(X, (0, 0, -first, first + length * self.factor - X.shape[1]))  # negative: cut off
        return X.unflatten(1, (length, self.factor))


def _mean(x: Tensor, where: Tensor) -> Tensor:
    """The mean of `x` over `where`; 0 if that is empty."""
    return x.masked_fill(~where, 0.0).sum() / where.sum().clamp(min=1)
