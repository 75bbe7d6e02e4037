import copy
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from asr.decode.options import DecodeOptions
from asr.decode.packing import can_pack
from asr.decode.precision import with_precision
from asr.decode.quantization import can_quantize
from asr.decode.recognizer import Recognizer
from asr.model.config import ModelConfig
from asr.model.language_model import LanguageModel, TextModel
from asr.model.transformer import Transformer

PACKED = pytest.mark.skipif(not can_pack(torch.device("cpu")), reason="oneDNN has no bfloat16 on this CPU")
QUICK = pytest.mark.skipif(not can_quantize(torch.device("cpu")), reason="this CPU has no AVX512-VNNI")


@pytest.mark.parametrize("encoder", ["transformer", "conformer"])
@pytest.mark.parametrize(("precision", "tolerance"), [("bfloat16", 0.1), pytest.param("int8", 0.1, marks=QUICK)])
@torch.inference_mode()
def test_posteriors_are_close_to_those_of_float32(encoder, precision, tolerance):
    config = ModelConfig(encoder=encoder, d_model=64, ffn_dim=128, encoder_layers=2, decoder_layers=2)
    model = Transformer(config).eval()
    batch = torch.randn(2, 90, 80), torch.tensor([90, 70]), torch.randint(4, 32, (2, 6)), torch.tensor([6, 3])
    exact = model(*batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quick = with_precision(copy.deepcopy(model), precision)(*batch)
    for ours, theirs in ((exact.log_probs, quick.log_probs), (exact.ctc_log_probs, quick.ctc_log_probs)):
        assert theirs.dtype == torch.float32
        assert 0 < (ours - theirs).abs().max() < tolerance


@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("int8", marks=QUICK)])
@pytest.mark.parametrize("strategy", ["beam", "rescore", "ctc", "greedy"])
def test_every_strategy_runs_in_it(tiny_model, noise_is_heard, precision, strategy):
    sound = np.random.default_rng(0).normal(0, 0.1, 16_000).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recognizer = Recognizer(tiny_model, DecodeOptions(strategy), precision=precision)
    assert recognizer.transcribe(sound).text


@pytest.mark.parametrize("precision", ["float32", "bfloat16", pytest.param("int8", marks=QUICK)])
def test_autocast_around_it_changes_nothing(tiny_model, noise_is_heard, precision):
    sound = np.random.default_rng(0).normal(0, 0.1, 16_000).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recognizer = Recognizer(tiny_model, precision=precision)
    alone = recognizer.transcribe(sound)
    with torch.autocast("cpu", torch.bfloat16):
        assert recognizer.transcribe(sound) == alone
        assert torch.is_autocast_enabled("cpu")


def test_whole_numbers_are_refused_where_they_are_not_quick(tiny_model, monkeypatch):
    monkeypatch.setattr("torch.cpu._is_vnni_supported", lambda: False)
    with pytest.raises(
        ValueError, match="precision: int8 is for CPUs with AVX512-VNNI or AMX; take (bfloat16|float32)"
    ):
        Recognizer(tiny_model, precision="int8")


def test_whole_numbers_are_refused_where_there_would_be_none(tiny_config):
    post_norm = Transformer(replace(tiny_config, norm_first=False))
    with pytest.raises(ValueError, match=r"models whose layers begin with a norm; take (bfloat16|float32) here"):
        with_precision(post_norm, "int8")


@pytest.mark.parametrize("precision", ["bfloat16", pytest.param("int8", marks=QUICK)])
def test_what_was_rounded_is_not_taken_for_exact(tiny_model, precision):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Recognizer(tiny_model, precision=precision)
    again = Recognizer(tiny_model, precision=precision)
    assert again.model is tiny_model
    with pytest.raises(ValueError, match=f"the model was changed to {precision} before: load its folder again"):
        Recognizer(tiny_model, precision="float32")


def test_another_name_is_refused(tiny_model):
    with pytest.raises(ValueError, match="float64"):
        Recognizer(tiny_model, precision="float64")


@pytest.mark.parametrize(("precision", "named"), [("float64", "float64"), ("float32", "was changed to bfloat16")])
def test_a_recogniser_that_is_refused_leaves_the_model_as_it_was(tiny_model, tiny_config, precision, named):
    """The language model is in bfloat16 already."""
    text_model = TextModel(LanguageModel(tiny_config).to(torch.bfloat16), tiny_model.tokenizer)
    with pytest.raises(ValueError, match=named):
        Recognizer(tiny_model, language_model=text_model, precision=precision, attention_window=(3, 2))
    assert tiny_model.transformer.config.attention_window is None


@pytest.mark.parametrize("precision", [pytest.param("bfloat16", marks=PACKED), pytest.param("int8", marks=QUICK)])
def test_a_packed_model_gives_no_wrong_gradients(tiny_model, precision):
    transformer = Recognizer(tiny_model, precision=precision).model.transformer
    X, Y = (torch.randn(1, 60, 80), torch.tensor([60])), (torch.tensor([[4, 5]]), torch.tensor([2]))
    assert not transformer(*X, *Y).log_probs.requires_grad  # nothing in it can be trained
    with pytest.raises(ValueError, match="cannot be saved, copied or differentiated"):
        transformer(X[0].requires_grad_(), X[1], *Y)
