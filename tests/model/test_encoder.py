"""An encoder made of other layers."""

import re

import pytest
import torch

from asr.audio.config import FeatureConfig
from asr.model import encoder
from asr.model.config import CHOICES, ModelConfig
from asr.model.folder import ModelError
from asr.model.layers import layers_of
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from asr.text.tokenizer import CharTokenizer
from tests.conftest import LETTERS, ROOT

SHAPE = {"d_model": 16, "num_heads": 2, "encoder_layers": 2, "decoder_layers": 1, "ffn_dim": 32, "dropout": 0.0}


def test_a_layer_of_ones_own_is_one_as_the_others(tmp_path, monkeypatch):
    """The example of docs/extending.md."""
    monkeypatch.setitem(CHOICES, "encoder", CHOICES["encoder"])
    monkeypatch.setattr(encoder, "LAYERS", dict(encoder.LAYERS))
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
    exec(example, {"__name__": "mine"})
    transformer = Transformer(ModelConfig(**SHAPE, encoder="with_convolution"))
    assert len(layers_of(transformer.encoder)) == 2
    X, Y = torch.randn(2, 80, 80), torch.tensor([[5, 6], [7, 0]])
    out = transformer(X, torch.tensor([80, 50]), Y, torch.tensor([2, 1]))
    out.log_probs.sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in transformer.encoder.layers[0].convolution.parameters())
    alone, _ = transformer.encoder(X[1:, :50], torch.tensor([50]))
    torch.testing.assert_close(out.memory[1:, : alone.shape[1]], alone)
    model = SpeechModel(FeatureConfig(), transformer, CharTokenizer(LETTERS))
    model.save(tmp_path)
    loaded = SpeechModel.load(tmp_path)
    torch.testing.assert_close(loaded.transformer.encoder(X, torch.tensor([80, 50]))[0], out.memory)
    monkeypatch.undo()
    with pytest.raises(ModelError, match="model.encoder: 'with_convolution' is not one of transformer, conformer"):
        SpeechModel.load(tmp_path)


def test_a_part_that_was_replaced_is_told_in_a_line(tmp_path, tiny_config):
    model = SpeechModel(FeatureConfig(), Transformer(tiny_config), CharTokenizer(LETTERS))
    model.transformer.encoder.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))
    model.save(tmp_path)
    with pytest.raises(ModelError, match="not a model that this version can read") as told:
        SpeechModel.load(tmp_path)
    assert len(str(told.value)) < 450 + len(str(tmp_path))
