"""A model as it is shipped: front end, Transformer, tokenizer and normaliser, and the folder they live in.

The folder holds `model.safetensors`, `config.json` and the tokenizer's file. Nothing in it is ever unpickled.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from asr.audio.features import FeatureConfig, FrontEnd
from asr.model.config import ModelConfig
from asr.model.transformer import Output, Transformer
from asr.text.normalizer import get_normalizer
from asr.text.tokenizer import Tokenizer, load_tokenizer

WEIGHTS, CONFIG = "model.safetensors", "config.json"
TIED = "transformer.decoder.output.weight"


class ModelError(ValueError):
    """A folder that holds no model that this version can read; the message names the folder."""


class SpeechModel(nn.Module):
    """Sound `(B, N)` (or matrices `(B, T, d)`) and tokens to posteriors, with all that text needs around it."""

    def __init__(
        self, features: FeatureConfig, transformer: Transformer, tokenizer: Tokenizer, normalizer: str = "english"
    ):
        super().__init__()
        self.front_end = FrontEnd(features)
        self.transformer = transformer
        self.tokenizer = tokenizer
        self.normalizer_name = normalizer
        self.normalize = get_normalizer(normalizer)

    @property
    def device(self) -> torch.device:
        return self.front_end.mean.device

    def forward(self, inputs: Tensor, lens: Tensor, Y: Tensor, Y_lens: Tensor) -> Output:
        """`inputs (B, N)` samples, `lens (B,)`, tokens Y `(B, U)`, Y_lens `(B,)`."""
        X, X_lens = self.front_end(inputs, lens)
        return self.transformer(X, X_lens, Y, Y_lens)

    def save(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        """Writes the model folder; `dtype` is that of the Transformer's weights on disk."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = self.transformer.config
        tensors = {
            name: tensor.to(dtype if name.startswith("transformer.") else tensor.dtype).contiguous().cpu()
            for name, tensor in self.state_dict().items()
            if not (config.tie_output and name == TIED)
        }
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        description = {
            "features": asdict(self.front_end.config),
            "model": config.to_dict(),
            "normalizer": self.normalizer_name,
        }
        (folder / CONFIG).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")
        self.tokenizer.save(folder)

    @classmethod
    def load(cls, folder: str | Path, device: str | torch.device = "cpu") -> SpeechModel:
        """The model of a folder, in float32 and evaluation mode. Raises ModelError saying what is wrong with it."""
        folder = Path(folder)
        try:
            description = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            features = FeatureConfig(**description["features"])
            config = ModelConfig.from_dict(description["model"])
            with torch.device("meta"):  # start values would only be overwritten
                transformer = Transformer(config)
            transformer.to_empty(device="cpu").decoder.tie_output()
            model = cls(features, transformer, load_tokenizer(folder), description["normalizer"])
            tensors = load_file(folder / WEIGHTS)
            if config.tie_output:
                tensors[TIED] = tensors["transformer.decoder.embedding.weight"]
            model.load_state_dict(tensors)
        except FileNotFoundError as error:
            raise ModelError(
                f"{folder}: not a model folder ({Path(error.filename or folder).name} is missing)"
            ) from None
        except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
            raise ModelError(f"{folder}: not a model that this version reads ({str(error).splitlines()[0]})") from None
        return model.to(device).eval()
