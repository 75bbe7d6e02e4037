import pytest
import torch

from asr.decode.options import DecodeOptions, Hypothesis
from asr.decode.recognizer import Recognizer
from asr.decode.search import search
from asr.decode.timestamps import LATEST_BEGIN, apply_timestamp_rules_, timed_segments
from asr.model.config import ModelConfig
from asr.model.transformer import Transformer

FORBIDDEN = -1e9
FIRST, EOS = 20, 3  # for a vocabulary of 20 tokens and 101 times
CONFIG = ModelConfig(
    vocab_size=FIRST + 101,
    d_model=32,
    ffn_dim=64,
    encoder_layers=1,
    decoder_layers=1,
    prompt=(19,),
    eos=18,
    suppressed=(0, 19),
    ctc=False,
    first_timestamp=FIRST,
)


def allowed(tokens: list[int], likely: int = 5) -> set[int]:
    """The tokens that may follow `tokens` if `likely` is likelier than all times together; the other hypothesis in the
    beam is at the last time."""
    scores = torch.full((1, 2, CONFIG.vocab_size), -20.0)
    scores[0, 0, likely] = 0.0
    history = torch.tensor([[tokens, [FIRST + 100] * len(tokens)]], dtype=torch.long)
    apply_timestamp_rules_(scores, history, CONFIG, FORBIDDEN)
    return set((scores[0, 0] > FORBIDDEN).nonzero()[:, 0].tolist())


TEXT = set(range(18))


def times(first: int, last: int = 100) -> set[int]:
    return set(range(FIRST + first, FIRST + last + 1))


def test_a_transcript_begins_with_a_time_within_a_second():
    assert allowed([]) == times(0, LATEST_BEGIN)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([FIRST], TEXT | {18, 19}),  # text after the first time; other suppressed tokens are not judged here
        ([FIRST, 7], TEXT | {18, 19} | times(1)),  # more text, the end, or a later time
        ([FIRST, 7, FIRST + 30], {18, 19} | times(30)),  # the end, or a second time, which starts the next segment
        ([FIRST, 7, FIRST + 30, FIRST + 30], TEXT | {18, 19}),
        ([FIRST, 7, FIRST + 30, FIRST + 40, 8], TEXT | {18, 19} | times(41)),
    ],
)
def test_times_come_in_pairs_and_never_go_back(tokens, expected):
    assert allowed(tokens, likely=18) == expected


def test_where_all_times_together_are_likelier_than_any_token_one_comes():
    scores = torch.full((1, 1, CONFIG.vocab_size), -8.0)
    scores[0, 0, 5] = -4.0  # 101 times at -8 have -3.4 together
    apply_timestamp_rules_(scores, torch.tensor([[[FIRST, 7]]]), CONFIG, FORBIDDEN)
    assert set((scores[0, 0] > FORBIDDEN).nonzero()[:, 0].tolist()) == times(1)


def test_a_hypothesis_is_cut_at_its_times():
    tokens = [FIRST, 5, 6, FIRST + 50, FIRST + 60, 7, FIRST + 99]
    scores = [-0.1 * i for i in range(7)]
    first, second = timed_segments(Hypothesis(tokens, sum(scores), scores), CONFIG)
    assert (first.begin, first.end, first.hypothesis.tokens) == (0.0, 1.0, [5, 6])
    assert (second.begin, second.end, second.hypothesis.tokens) == (1.2, pytest.approx(1.98), [7])
    assert second.hypothesis.token_scores == [scores[5]]


def test_what_ends_without_a_time_has_none():
    (only,) = timed_segments(Hypothesis([FIRST + 5, 7], -1.0, [-0.5, -0.5]), CONFIG)
    assert (only.begin, only.end, only.hypothesis.tokens) == (0.1, None, [7])


@pytest.mark.parametrize("tokens", [[], [5, 6]])
def test_a_model_without_times_has_one_stretch(tokens, tiny_config):
    hypothesis = Hypothesis(tokens, -1.0, [-0.5] * len(tokens))
    (only,) = timed_segments(hypothesis, tiny_config)
    assert (only.begin, only.end) == (None, None)
    assert only.hypothesis == hypothesis


@pytest.mark.parametrize("beam_size", [1, 3])
def test_every_hypothesis_of_a_search_keeps_the_rules(beam_size):
    model = Transformer(CONFIG).eval()
    memory, lens = model.encoder(torch.randn(4, 160, 80), torch.tensor([160, 120, 160, 90]))
    found = search(model, memory, lens, DecodeOptions(beam_size=beam_size, ctc_weight=0.0, nbest=beam_size))
    for hypothesis in (h for best in found for h in best if h.tokens):
        for i, token in enumerate(hypothesis.tokens):
            scores = torch.zeros(1, 1, CONFIG.vocab_size)
            scores[0, 0, token] = 9.0
            apply_timestamp_rules_(scores, torch.tensor(hypothesis.tokens[:i]).reshape(1, 1, -1), CONFIG, FORBIDDEN)
            assert scores[0, 0, token] > FORBIDDEN


@pytest.mark.parametrize("beam_size", [1, 3])
@pytest.mark.parametrize("limit", [3, 5, 6, 9])
def test_at_its_limit_a_hypothesis_ends_though_a_time_would_be_due(beam_size, limit, monkeypatch):
    model = Transformer(CONFIG).eval()
    probabilities = torch.cat([torch.full((FIRST,), 0.35 / FIRST), torch.full((101,), 0.6 / 101)])
    monkeypatch.setattr(
        model.decoder, "step", lambda tokens, state: (probabilities.log().expand(*tokens.shape, -1).clone(), state)
    )
    options = DecodeOptions(beam_size=beam_size, ctc_weight=0.0)
    ((best,),) = search(model, torch.randn(1, limit, 32), torch.tensor([limit]), options)
    assert best.tokens
    assert -1000 < best.score < 0


def test_times_are_judged_by_the_posteriors_whatever_the_temperature(monkeypatch):
    """If all times together are less likely than the likeliest token, a draw gives a time with their probability."""
    model = Transformer(CONFIG).eval()
    probabilities = torch.cat([torch.full((FIRST,), 1e-6), torch.full((101,), 0.1 / 101)])
    probabilities[5] = 0.9
    monkeypatch.setattr(
        model.decoder, "step", lambda tokens, state: (probabilities.log().expand(*tokens.shape, -1).clone(), state)
    )
    n = 2000
    options = DecodeOptions("greedy", beam_size=1, temperature=1.0)
    found = search(model, torch.randn(1, 4, 32).expand(n, -1, -1), torch.full((n,), 4), options)
    third = [best[0].tokens[2] >= FIRST for best in found if len(best[0].tokens) > 2]
    assert sum(third) / len(third) == pytest.approx(0.1, abs=0.03)


def test_times_become_segments(tiny_model, monkeypatch):
    """The search is replaced by a given hypothesis: three letters, a pause of one second, two letters that would end
    after the sound, in the padding of a window."""
    import dataclasses

    import numpy as np

    config = tiny_model.transformer.config
    tiny_model.transformer.config = dataclasses.replace(config, first_timestamp=config.vocab_size - 1)
    first = config.vocab_size - 1
    tokens = [first, 6, 7, 8, first + 50, first + 100, 9, 10, first + 250]
    recognizer = Recognizer(tiny_model, DecodeOptions("greedy", beam_size=1))
    monkeypatch.setattr(
        recognizer, "recognize", lambda inputs: [[Hypothesis(tokens, -9.0, [-1.0] * 9)] for _ in inputs]
    )
    transcript = recognizer.transcribe(np.full(4 * 16_000, 0.1, np.float32))
    assert [(s.start, s.end, len(s.text)) for s in transcript.segments] == [(0.0, 1.0, 3), (2.0, 4.0, 2)]
