from dataclasses import replace

import pytest
import torch

from asr.audio.config import FeatureConfig
from asr.model.averaging import average_models
from asr.model.folder import ModelError
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from asr.text.tokenizer import CharTokenizer


def another(model: SpeechModel, tokenizer=None, **config) -> SpeechModel:
    """A model with its own random weights and the same shape, except for what `tokenizer` and `config` change."""
    tokenizer = tokenizer or model.tokenizer
    shape = replace(model.transformer.config, vocab_size=len(tokenizer), **config)
    return SpeechModel(model.front_end.config, Transformer(shape), tokenizer, model.normalizer_name)


def test_the_average_of_models_is_the_mean_of_their_weights(tiny_model, tmp_path):
    models = [tiny_model, another(tiny_model), another(tiny_model, dropout=0.3)]
    for i, model in enumerate(models):
        model.save(tmp_path / str(i))
    mean = average_models([tmp_path / str(i) for i in range(3)]).state_dict()
    for name, *weights in zip(mean, *(model.state_dict().values() for model in models), strict=True):
        torch.testing.assert_close(mean[name], sum(weights) / 3 if weights[0].is_floating_point() else weights[0])


def test_of_a_model_with_other_tokens_what_belongs_to_these_is_left_out(tiny_model, tmp_path):
    other = another(tiny_model, CharTokenizer.train(["abc"]), suppressed=(4,))
    tiny_model.save(tmp_path / "a")
    other.save(tmp_path / "b")
    mean = average_models([tmp_path / "a", tmp_path / "b"])
    assert mean.tokenizer == tiny_model.tokenizer
    ours, theirs = tiny_model.state_dict(), other.state_dict()
    weights = mean.state_dict()
    embedding, inner = "transformer.decoder.embedding.weight", "transformer.encoder.layers.0.attention.query.weight"
    assert torch.equal(weights[embedding], ours[embedding])
    torch.testing.assert_close(weights[inner], (ours[inner] + theirs[inner]) / 2)


def test_models_of_other_shapes_have_no_mean(tiny_model, tmp_path):
    tiny_model.save(tmp_path / "a")
    another(tiny_model, activation="gelu").save(tmp_path / "b")
    with pytest.raises(ModelError, match=r"b: activation is gelu, and \w+ in the first model"):
        average_models([tmp_path / "a", tmp_path / "b"])
    features = FeatureConfig(normalization="utterance")
    SpeechModel(features, tiny_model.transformer, tiny_model.tokenizer).save(tmp_path / "c")
    with pytest.raises(ModelError, match="c: other features than the first model's"):
        average_models([tmp_path / "a", tmp_path / "c"])
