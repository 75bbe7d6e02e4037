"""A complete model as it is shipped: features, Transformer, tokenizer and normaliser, and the folder that holds them.

The folder has `model.safetensors`, `config.json`, the tokenizer's file and, if the model was trained with this package,
the bigram of its transcripts.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn

from asr.audio.config import FeatureConfig
from asr.audio.features import FrontEnd
from asr.model.bigram import FILE, Bigram
from asr.model.config import ModelConfig
from asr.model.encoder import check_front_end
from asr.model.folder import WithoutStartValues, described, load_weights, write_folder
from asr.model.transformer import Output, Transformer
from asr.text.loading import check_size, load_tokenizer, save_tokenizer
from asr.text.normalizer import get_normalizer
from asr.text.tokenizer import Tokenizer


class SpeechModel(nn.Module):
    """Audio `(B, N)`, matrices `(B, T, d)` or token ids `(B, T)`, and target tokens, to posteriors; with everything
    that text processing needs."""

    def __init__(
        self, features: FeatureConfig, transformer: Transformer, tokenizer: Tokenizer, normalizer: str = "english"
    ):
        """Raises ValueError if the parts do not fit together."""
        super().__init__()
        check_front_end(features, transformer.config)
        check_size(tokenizer, transformer.config.vocab_size)
        self.front_end = FrontEnd(features)
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.normalizer_name = normalizer
        self.normalize = get_normalizer(normalizer)
        self.trained_seconds: float | None = None  # nearly all its training utterances are at most so long, if known

    @property
    def device(self) -> torch.device:
        return self.front_end.mean.device

    def forward(self, inputs: Tensor, lens: Tensor, Y: Tensor, Y_lens: Tensor) -> Output:
        """`inputs (B, N)` samples, `lens (B,)`, tokens Y `(B, U)`, Y_lens `(B,)`."""
        X, X_lens = self.front_end(inputs, lens)
        return self.transformer(X, X_lens, Y, Y_lens)

    def save(self, folder: str | Path, dtype: str = "float32") -> None:
        """Writes the model folder; `dtype` is the type of the Transformer's weights on disk."""
        description = {
            "features": asdict(self.front_end.config),
            "model": asdict(self.transformer.config),
            "normalizer": self.normalizer_name,
            "trained_seconds": self.trained_seconds,
        }
        write_folder(folder, self, description, dtype)
        save_tokenizer(self.tokenizer, folder)
        if self.transformer.bigram:
            self.transformer.bigram.save(folder)
        else:
            (Path(folder) / FILE).unlink(missing_ok=True)

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> SpeechModel:
        """The model in a folder, in float32 and evaluation mode. Raises ModelError with the reason."""
        with described(folder, "model") as description:
            with WithoutStartValues():
                transformer = Transformer(ModelConfig(**description["model"]))
            features = FeatureConfig(**description["features"])
            tokenizer = load_tokenizer(folder)
            model = cls(features, transformer, tokenizer, description["normalizer"])
            load_weights(model, folder)
            model.trained_seconds = description.get("trained_seconds")
            transformer.bigram = Bigram.load(folder, transformer.config.vocab_size)
        return model.to(device).eval()
