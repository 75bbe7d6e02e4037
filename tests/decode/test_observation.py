import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import asr
from asr.audio.config import FeatureConfig
from asr.audio.reading import read_audio
from asr.decode.observation import diagonality, entropy, observe, score_spread, unscaled
from asr.decode.options import DecodeOptions, Hypothesis
from asr.decode.recognizer import Recognizer
from asr.model.dot_product import attention_weights
from asr.model.masks import window_mask
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from asr.resources import resource
from asr.text.tokenizer import CharTokenizer
from tests.conftest import LETTERS
from tests.kinds import MODELS, TINY


@pytest.fixture(scope="module")
def shipped():
    recognizer = asr.load()
    sound = read_audio(resource("data", "samples", "corner.flac"))
    return recognizer, sound, observe(recognizer, sound)


def test_what_is_observed_is_what_is_transcribed(shipped):
    recognizer, sound, observation = shipped
    assert observation.text == recognizer.transcribe(sound).text == "a man with a black dog was standing at the corner"
    assert [word.text for word in observation.words] == observation.text.split()
    assert "".join(observation.tokens[:-1]).replace("\u2423", " ").strip() == observation.text
    assert observation.tokens[-1] == "<eos>"


def test_it_is_observed_in_the_models_own_precision(tiny_model):
    recognizer = Recognizer(tiny_model, precision="float32")
    sound = np.random.default_rng(0).normal(0, 0.1, 8000).astype(np.float32)
    alone = observe(recognizer, sound)
    with torch.autocast("cpu", torch.bfloat16):
        under = observe(recognizer, sound)
    assert torch.equal(under.ctc, alone.ctc) and torch.equal(under.self_attention, alone.self_attention)


def test_words_follow_each_other_in_time(shipped):
    *_, observation = shipped
    edges = [edge for word in observation.words for edge in (word.start, word.end)]
    assert edges == sorted(edges) and edges[0] >= 0 and edges[-1] <= observation.length
    spoken = {word.text: word.start for word in observation.words}
    assert spoken["black"] == pytest.approx(0.7, abs=0.2) and spoken["corner"] == pytest.approx(2.1, abs=0.2)


def test_all_weights_are_there_and_sum_to_one(shipped):
    recognizer, _, observation = shipped
    config = recognizer.model.transformer.config
    M, T = len(observation.ctc), len(observation.tokens)
    assert observation.self_attention.shape == (config.encoder_layers, config.num_heads, M, M)
    assert observation.cross_attention.shape == (config.decoder_layers, config.num_heads, T, M)
    assert observation.positions.shape == (M, config.d_model)
    for weights in (observation.self_attention, observation.cross_attention):
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:-1]), atol=0.02, rtol=0)  # bfloat16
    assert observation.ctc.sum(dim=1) == pytest.approx(np.ones(M), abs=1e-4)


def test_entropy_of_even_and_of_sharp_attention():
    assert float(entropy(torch.full((3, 8), 1 / 8))) == pytest.approx(math.log(8))
    assert float(entropy(torch.eye(8))) == pytest.approx(0, abs=1e-6)


def test_diagonality_of_the_diagonal_of_even_attention_and_of_the_far_corner():
    assert float(diagonality(torch.eye(9))) == 1
    assert float(diagonality(torch.eye(9).flip(0)[:1])) == 0  # the first query looks at the last key
    assert 0.3 < float(diagonality(torch.full((9, 9), 1 / 9))) < 0.7
    two_to_one = torch.zeros(5, 9)
    two_to_one[torch.arange(5), torch.arange(0, 9, 2)] = 1  # fewer queries than keys, as in cross-attention
    assert float(diagonality(two_to_one)) == 1


def test_the_spread_of_the_scores_comes_from_the_weights_alone():
    Q, K = torch.randn(1, 2, 50, 64), torch.randn(1, 2, 40, 64)
    raw = Q @ K.mT
    with_scale, without = score_spread(attention_weights(Q, K), key_dim=64)
    torch.testing.assert_close(with_scale, (raw / 8).std(dim=-1).mean(dim=-1), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(without, raw.std(dim=-1).mean(dim=-1), atol=1e-3, rtol=1e-4)
    assert with_scale.mean() == pytest.approx(1, abs=0.1)  # unit variance is what 1/√d_k is for
    torch.testing.assert_close(unscaled(attention_weights(Q, K), 64), raw.softmax(dim=-1), atol=1e-3, rtol=1e-3)


def test_what_a_window_hides_has_no_score():
    Q, K = torch.randn(1, 2, 50, 64), torch.randn(1, 2, 50, 64)
    inside = ~window_mask(50, 4, 4)
    weights = attention_weights(Q, K, ~inside)
    raw = (Q @ K.mT) / 8
    expected = torch.stack([raw[..., i, inside[i]].std(dim=-1) for i in range(50)]).mean(dim=0)
    torch.testing.assert_close(score_spread(weights, 64)[0], expected, atol=1e-4, rtol=1e-4)
    assert not unscaled(weights, 64)[..., ~inside].any()
    assert score_spread(torch.ones(3, 1), 64)[0] == 0  # one key has no spread


def test_frames_stand_in_the_middle_of_what_they_see(shipped):
    recognizer, _, observation = shipped
    first, end = observation.frames
    assert recognizer.model.transformer.config.subsampling == 8
    # the first encoder frame sees features 0 to 14: from 0 s to the end of the last one's window at 0.165 s
    step = (end - first) / len(observation.ctc)
    assert step == pytest.approx(0.08) and first + step / 2 == pytest.approx(0.165 / 2, abs=0.006)


@pytest.mark.parametrize("seconds", [1.0, 1.1])
def test_what_pads_to_a_window_is_not_seen(tiny_config, seconds):
    model = SpeechModel(FeatureConfig("whisper", pad_seconds=3.0), Transformer(tiny_config), CharTokenizer(LETTERS))
    sound = np.random.default_rng(0).normal(0, 0.1, round(seconds * 16000)).astype(np.float32)
    observation = observe(Recognizer(model, precision="float32"), sound)
    assert observation.length == seconds and len(observation.features) == round(seconds * 100)


def test_silence_has_no_words(tiny_model):
    observation = observe(Recognizer(tiny_model, precision="float32"), np.zeros(16000, np.float32))
    assert observation.text == "" and observation.words == [] and observation.tokens == ["<eos>"]


def test_doubtful_words_without_speech_were_not_said(shipped, monkeypatch):
    recognizer, sound, observation = shipped
    monkeypatch.setattr("asr.decode.recognizer.SURE", 1.1)
    monkeypatch.setattr("asr.decode.recognizer.has_speech", lambda sound: False)
    assert observation.text and not observe(recognizer, sound).text


def test_where_ctc_cannot_align_them_words_lie_where_the_decoder_looks(tiny_model, monkeypatch):
    recognizer = Recognizer(tiny_model, DecodeOptions("greedy", beam_size=1, ctc_weight=0), precision="float32")
    sound = np.random.default_rng(0).normal(0, 0.1, 16000).astype(np.float32)
    letters = tiny_model.tokenizer.encode("aaaaaaaaaa aaaaaaaaaaaa")  # with the blanks between, longer than the frames
    monkeypatch.setattr(recognizer, "search", lambda memory, lens: [[Hypothesis(letters, 0.0, [0.0] * len(letters))]])
    observation = observe(recognizer, sound)
    assert [word.text for word in observation.words] == ["a" * 10, "a" * 12]


def test_without_ctc_words_lie_where_the_decoder_looks(tiny_config):
    config = replace(tiny_config, ctc=False, positions="rotary")
    model = SpeechModel(FeatureConfig(), Transformer(config), CharTokenizer(LETTERS)).eval()
    recognizer = Recognizer(model, DecodeOptions("greedy", beam_size=1, ctc_weight=0), precision="float32")
    sound = np.random.default_rng(0).normal(0, 0.1, 16000).astype(np.float32)
    observation = observe(recognizer, sound)
    assert observation.ctc is None
    assert observation.positions.shape[1] == config.key_dim // 2
    assert all(0 <= word.start < word.end <= observation.length + 0.1 for word in observation.words)


def test_of_a_text_it_says_which_tokens_were_read():
    config, fields = MODELS["of text"]
    model = SpeechModel(config, Transformer(replace(TINY, **fields)), CharTokenizer(LETTERS)).eval()
    tokens = np.array(model.tokenizer.encode("a b"))
    observation = observe(Recognizer(model, precision="float32"), tokens)
    assert observation.source == ["a", "\u2423", "b"] and observation.features.tolist() == tokens.tolist()
    assert observation.unit == "tokens" and observation.length == 3 and observation.frames == (0, 3)
