from dataclasses import replace

import pytest
import torch

from asr.decode.beam import BeamSearch
from asr.decode.fallback import needs_fallback, search_with_fallback
from asr.decode.options import DecodeOptions, Hypothesis
from asr.decode.phrases import Phrases
from asr.decode.search import attention_scores, search
from asr.model.config import ModelConfig
from asr.model.language_model import LanguageModel
from asr.model.transformer import Transformer
from asr.text.tokenizer import CharTokenizer
from tests.conftest import LETTERS


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(3)
    return Transformer(ModelConfig(d_model=32, ffn_dim=64, encoder_layers=1, decoder_layers=1)).eval()


@pytest.mark.parametrize(
    ("text", "score", "expected"),
    [
        ("it was the best of times it was the worst of times", -1.0, False),
        ("it was the best of times", -11.0, True),  # ten tokens, including the end
        ("it was the best of times", -9.5, False),
        ("la la la la la la la la la la la la la la la la la la la la la la la la", -1.0, True),
        ("", -99.0, False),
    ],
)
def test_what_repeats_itself_or_is_unlikely_is_doubtful(text, score, expected):
    assert needs_fallback(text, 9, score) == expected


def test_only_the_doubtful_are_drawn_anew_and_what_was_drawn_last_stays(model):
    memory, lens = torch.randn(3, 12, 32), torch.tensor([12, 9, 12])
    options = DecodeOptions(beam_size=2, ctc_weight=0.0, fallback=(0.5, 1.0))
    before = search_with_fallback(model, memory, lens, replace(options, fallback=()), None, lambda h: "")

    def text(hypothesis: Hypothesis) -> str:
        return "a" * 400 if hypothesis.tokens == before[1][0].tokens else ""  # an empty text is never doubtful

    after = search_with_fallback(model, memory, lens, options, None, text)
    assert [best[0].tokens for best in after][::2] == [best[0].tokens for best in before][::2]
    assert after[1][0].tokens != before[1][0].tokens


@pytest.mark.parametrize("beside", ["ctc_weight", "length_bonus", "language model", "phrases"])
def test_what_is_unlikely_the_decoder_alone_says(model, monkeypatch, beside):
    judged: list[float] = []
    monkeypatch.setattr("asr.decode.fallback.needs_fallback", lambda text, tokens, score: judged.append(score))
    memory, lens, options = torch.randn(1, 9, 32), torch.tensor([9]), DecodeOptions(ctc_weight=0.0, fallback=(0.5,))
    if beside in ("ctc_weight", "length_bonus"):
        options = replace(options, **{beside: 0.9})
    language_model = LanguageModel(model.config).eval() if beside == "language model" else None
    phrases = Phrases.of([["abc"]], 2.0, CharTokenizer(LETTERS)) if beside == "phrases" else None
    [[best]] = search_with_fallback(model, memory, lens, options, language_model, lambda h: "", phrases)
    [[[*scores]]] = attention_scores(model, memory, lens, [[best]])
    assert judged == [pytest.approx(sum(scores))] and judged != [pytest.approx(best.score)]


def test_draws_follow_the_tempered_distribution(model):
    """Compares the first tokens of many draws from one memory with the decoder's own posteriors."""
    n, temperature = 4000, 0.7
    X = torch.randn(1, 60, 80)
    options = DecodeOptions("greedy", beam_size=1, temperature=temperature)
    with torch.inference_mode():
        memory, lens = model.encoder(X, torch.tensor([60]))
        log_probs = model.decoder(torch.tensor([[2]]), memory, lens)[0, 0]
        log_probs[[0, 2]] = -torch.inf
        expected = (log_probs / temperature).softmax(dim=0)
    found = search(model, memory.expand(n, -1, -1), lens.expand(n), options)
    first = torch.tensor([best[0].tokens[0] if best[0].tokens else 3 for best in found])
    drawn = torch.bincount(first, minlength=32) / n
    assert (drawn - expected).abs().sum() < 0.12


def test_draws_end_where_the_end_was_drawn(model, monkeypatch):
    """A decoder that ends with probability 0.3 at each step: lengths are geometric, 0.3 of them 0."""
    probabilities = torch.full((32,), 0.7 / 29)
    probabilities[[0, 2]] = 0.0
    probabilities[3] = 0.3

    def step(tokens, state):
        return probabilities.log().clamp(min=-1e4).expand(*tokens.shape, -1).clone(), state

    monkeypatch.setattr(model.decoder, "step", step)
    n = 3000
    memory, lens = torch.randn(1, 60, 32).expand(n, -1, -1), torch.full((n,), 60)
    options = DecodeOptions("greedy", beam_size=1, temperature=1.0)
    found = BeamSearch(model, memory, lens, replace(options, ctc_weight=0.0), None).run()
    sizes = torch.tensor([float(len(best[0].tokens)) for best in found])
    assert (sizes == 0).float().mean() == pytest.approx(0.3, abs=0.04)
    assert sizes.mean() == pytest.approx(0.7 / 0.3, abs=0.25)


def test_a_draw_has_its_own_log_probability_and_comes_again(model):
    X, lens = torch.randn(2, 60, 80), torch.tensor([60, 60])
    options = DecodeOptions("greedy", beam_size=1, temperature=1.0)
    with torch.inference_mode():
        memory, memory_lens = model.encoder(X, lens)
        found, again = (search(model, memory, memory_lens, options) for _ in range(2))
        assert found == again
        tokens = found[0][0].tokens
        log_probs = model.decoder(torch.tensor([[2, *tokens]]), memory[:1], memory_lens[:1])[0]
        score = sum(float(log_probs[i, token]) for i, token in enumerate([*tokens, 3]))
    assert found[0][0].score == pytest.approx(score, abs=1e-4)


def test_a_temperature_is_for_greedy_search():
    with pytest.raises(ValueError, match="greedy"):
        DecodeOptions("beam", temperature=0.5)
    with pytest.raises(ValueError, match="positive"):
        DecodeOptions(fallback=(0.0,))
