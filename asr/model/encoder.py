"""The encoder: subsampler, positions, a stack of Transformer or Conformer layers."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from asr.audio.config import FeatureConfig
from asr.model.config import CHOICES, ModelConfig
from asr.model.flash_attention import lens_for_kernels
from asr.model.layers import ConformerEncoderLayer, TransformerEncoderLayer, start_near_identity
from asr.model.masks import length_mask
from asr.model.positions import Positions
from asr.model.subsampling import SUBSAMPLERS

LAYERS = {"transformer": TransformerEncoderLayer, "conformer": ConformerEncoderLayer}


def add_layer(name: str, layer: Callable[[ModelConfig], nn.Module]) -> None:
    """Lets `model.encoder` be `name`: a stack of what `layer` builds, which is called as a `TransformerEncoderLayer` is
    (docs/extending.md)."""
    LAYERS[name] = layer
    CHOICES["encoder"] = (*CHOICES["encoder"], name)


def check_front_end(features: FeatureConfig, config: ModelConfig) -> None:
    """Raises ValueError if the encoder cannot read the front end's output."""
    if (features.takes == "text") != (config.subsampler == "embedding"):
        raise ValueError("features.kind=text and model.subsampler=embedding go together")
    if features.takes != "text" and features.dim != config.input_dim:
        raise ValueError(f"features.dim={features.dim}, but model.input_dim={config.input_dim}")


class Encoder(nn.Module):
    """Features X `(B, T, d)` to memory `(B, M, D)`."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.subsampling = SUBSAMPLERS[config.subsampler](config)
        self.positions = Positions(config)
        self.layers = nn.ModuleList(LAYERS[config.encoder](config) for _ in range(config.encoder_layers))
        self.norm = nn.LayerNorm(config.d_model) if config.norm_first else nn.Identity()
        if config.norm_first:
            start_near_identity(self.layers)

    def forward(
        self, X: Tensor, X_lens: Tensor, weights: list[Tensor] | None = None, outputs: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Memory `(B, M, D)` and its lengths. `weights` collects each layer's self-attention `(B, H, M, M)`, `outputs`
        each layer's output `(B, M, D)`, before the norm at the end of the stack."""
        x, lens = self.subsampling(X.to(self.subsampling.dtype), X_lens)
        size = x.shape[1]
        mask, kernel_lens = length_mask(lens, size), lens_for_kernels(lens)
        x = self.positions(x)
        for layer in self.layers:
            x = layer(x, mask, weights, kernel_lens)
            if outputs is not None:
                outputs.append(x)
        return self.norm(x), lens
