"""A language model over the recogniser's tokens: a decoder without a memory (Vaswani et al. 2017; Radford et al. 2018).

Its folder is like a recogniser's: `model.safetensors`, `config.json` and the tokenizer.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from asr.model.cache import AttentionCache
from asr.model.config import ModelConfig
from asr.model.decoder import TokenStack
from asr.model.flash_attention import lens_for_kernels
from asr.model.folder import WithoutStartValues, described, load_weights, write_folder
from asr.model.layers import TransformerEncoderLayer
from asr.text.loading import check_size, load_tokenizer, save_tokenizer
from asr.text.tokenizer import Tokenizer


class LanguageModel(TokenStack):
    """Tokens to log-posteriors of the next token. Its depth is that of the configuration's decoder."""

    def __init__(self, config: ModelConfig):
        # its layers use the encoder's settings for positions and window
        config = replace(config, positions=config.positions_of_decoder, attention_left=None, attention_right=None)
        super().__init__(config, partial(TransformerEncoderLayer, causal=True))

    def forward(self, Y_in: Tensor) -> Tensor:
        """Log-posteriors `(B, T', V)` of the token after each token of `Y_in (B, T')`, float32."""
        x = self.embed(Y_in)
        kernel_lens = lens_for_kernels(Y_in.new_full((len(Y_in),), Y_in.shape[1]))
        for layer in self.layers:
            x = layer(x, kernel_lens=kernel_lens)
        return self.log_posteriors(x)

    def start(self, batch: int, width: int) -> AttentionCache:
        """The cache before the first step, for `batch` utterances with `width` hypotheses each."""
        return AttentionCache.empty(self.config, len(self.layers), batch, width, self.embedding.weight)

    def step(self, tokens: Tensor, cache: AttentionCache) -> tuple[Tensor, AttentionCache]:
        """Log-posteriors `(B, W, V)` of the token after each of `tokens (B, W)`, the newest of their hypotheses."""
        cache, newest = cache.next_position()
        x = self.embed_newest(tokens, newest.position)
        for layer, past in zip(self.layers, cache.layers, strict=True):
            x = layer.step(x, past, newest)
        return self.log_posteriors(x), cache


class TextModel(nn.Module):
    """A language model with its tokenizer, and the folder that holds them."""

    def __init__(self, transformer: LanguageModel, tokenizer: Tokenizer, normalizer: str = "english"):
        """Raises ValueError if the two do not have the same number of tokens."""
        super().__init__()
        check_size(tokenizer, transformer.config.vocab_size)
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.normalizer_name = normalizer

    def save(self, folder: str | Path, dtype: str = "float32") -> None:
        """Writes the model folder; `dtype` is the type of the weights on disk."""
        description = {"language_model": asdict(self.transformer.config), "normalizer": self.normalizer_name}
        write_folder(folder, self.transformer, description, dtype)
        save_tokenizer(self.tokenizer, folder)

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> TextModel:
        """The language model in a folder, in float32 and evaluation mode. Raises ModelError if there is none."""
        with described(folder, "language_model") as description:
            with WithoutStartValues():
                transformer = LanguageModel(ModelConfig(**description["language_model"]))
            tokenizer = load_tokenizer(folder)
            model = cls(transformer, tokenizer, description["normalizer"])
            load_weights(transformer, folder)
        return model.to(device).eval()
