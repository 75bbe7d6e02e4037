"""An encoder without a decoder, the result of pre-training: front end and encoder, and the folder that holds them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from torch import nn

from asr.audio.config import FeatureConfig
from asr.audio.features import FrontEnd
from asr.model.config import ModelConfig
from asr.model.encoder import Encoder, check_front_end
from asr.model.folder import WithoutStartValues, described, load_weights, write_folder


class EncoderModel(nn.Module):
    """A front end and encoder that a recogniser can start from (`init_from`). Only the encoder of `config` is built."""

    def __init__(self, features: FeatureConfig, config: ModelConfig):
        super().__init__()
        check_front_end(features, config)
        self.front_end = FrontEnd(features)
        self.encoder = Encoder(config)

    def save(self, folder: str | Path, dtype: str = "float32") -> None:
        """Writes the model folder; `dtype` is the type of the weights on disk."""
        description = {"features": asdict(self.front_end.config), "encoder": asdict(self.encoder.config)}
        write_folder(folder, self, description, dtype)

    @classmethod
    def load(cls, folder: str | Path) -> EncoderModel:
        """The encoder in a folder, in float32. Raises ModelError if there is none."""
        with described(folder, "encoder") as description:
            with WithoutStartValues():
                model = cls(FeatureConfig(**description["features"]), ModelConfig(**description["encoder"]))
            load_weights(model, folder)
        return model
