"""Exported graphs compute what the model computes, for every kind of model."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from asr.audio.config import FeatureConfig
from asr.decode.graphs import DecoderGraph, EncoderGraph
from asr.decode.onnx import difference
from asr.decode.recognizer import Recognizer
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from asr.text.tokenizer import CharTokenizer
from tests.conftest import LETTERS
from tests.kinds import MODELS, TINY

CONV1D = {"subsampler": "conv1d", "subsampling": 2}
KINDS = MODELS | {
    "of the paper": (FeatureConfig(), {"norm_first": False}),
    "of everything": (
        FeatureConfig(normalization="utterance"),
        {
            **{"encoder": "conformer", "positions": "rotary", "attention_left": 5, "attention_right": 3, "d_v": 6},
            **{"decoder_positions": "learned", "max_positions": 30, "prompt": (2, 5, 6)},
        },
    ),
    "with a window of 3 s": (
        FeatureConfig(kind="whisper", pad_seconds=3.0),
        {**CONV1D, "ctc": False, "tokens_per_frame": 0.5, "suppressed": (0,), "suppressed_first": (4,)},
    ),
    "with a short table": (FeatureConfig(kind="whisper"), {**CONV1D, "positions": "learned", "max_positions": 101}),
    "of matrices by 6": (FeatureConfig(kind="matrix", dim=20), {"input_dim": 20, "subsampling": 6}),
}


def of_kind(kind: str, layers: int = 2) -> Recognizer:
    """A recogniser whose model is of this kind, with random weights."""
    features, fields = KINDS[kind]
    config = replace(TINY, encoder_layers=layers, decoder_layers=layers, **fields)
    model = SpeechModel(features, Transformer(config), CharTokenizer(LETTERS))
    for parameter in model.parameters():
        if parameter.dim() == 1:  # at the start, norms and biases have no effect
            nn.init.normal_(parameter, mean=1.0, std=0.1)
    return Recognizer(model, precision="float32")


@pytest.mark.parametrize("kind", KINDS)
def test_log_posteriors_are_the_models(kind):
    model = of_kind(kind)
    assert difference(model, EncoderGraph(model.model), DecoderGraph(model.model)) < 1e-4


def test_another_models_are_not():
    first, second = of_kind("of the paper"), of_kind("of the paper")
    assert difference(first, EncoderGraph(second.model), DecoderGraph(first.model)) > 0.1
    assert difference(first, EncoderGraph(first.model), DecoderGraph(second.model)) > 0.1


def test_what_is_no_number_or_has_another_length_is_not_the_same():
    model = of_kind("of text")
    encoder, decoder = EncoderGraph(model.model), DecoderGraph(model.model)

    def longer(*inputs):
        lens, *keys_and_values = encoder(*inputs)
        return lens + 1, *keys_and_values

    def doubtful(*inputs):
        log_probs, *past = decoder(*inputs)
        return log_probs * torch.nan, *past

    assert difference(model, longer, decoder) == math.inf
    assert math.isnan(difference(model, encoder, doubtful))


@torch.inference_mode()
def test_where_nothing_is_heard_there_is_nothing_to_attend_to(tiny_model, noise_is_heard, monkeypatch):
    encoder = EncoderGraph(tiny_model)
    sounds = torch.randn(3, 16_000) * torch.tensor([0.1, 1e-4, 0.1])[:, None]  # the second is silence
    lens = torch.tensor([16_000, 16_000, 300])  # the third is shorter than a frame
    assert encoder(sounds, lens)[0].tolist() == [23, 0, 0]
    monkeypatch.setattr("asr.decode.graphs.hears_something", lambda log_probs, lens: torch.zeros(3, dtype=torch.bool))
    assert encoder(sounds, lens)[0].tolist() == [0, 0, 0]
