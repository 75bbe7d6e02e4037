import itertools

import pytest
import torch

from asr.decode.options import DecodeOptions
from asr.decode.repetition import Repetition
from asr.decode.search import search
from asr.model.config import ModelConfig
from asr.model.transformer import Transformer
from asr.text.tokenizer import BLANK, EOS

FORBIDDEN = -1e9


def after(tokens: list[int]) -> Repetition:
    state = Repetition.start(1, 1, torch.device("cpu"))
    for token in tokens:
        state = state.advance(torch.tensor([[0]]), torch.tensor([[token]]))
    return state


def forbidden(tokens: list[int], max_repeats: int) -> list[int]:
    scores = torch.zeros(1, 1, 10)
    after(tokens).forbid_(scores, max_repeats, FORBIDDEN)
    return (scores[0, 0] == FORBIDDEN).nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([4, 4], []),
        ([4, 4, 4], [4]),
        ([5, 6, 5, 6, 5], []),
        ([5, 6, 5, 6, 5, 6], [5]),
        ([7, 5, 6, 8, 5, 6, 8, 5, 6, 8], [5]),
        ([5, 6, 5, 6, 5, 6, 7], []),
        ([4, 5, 4, 4, 5, 4], []),
    ],
)
def test_a_block_may_stand_three_times_in_a_row_and_no_more(tokens, expected):
    assert forbidden(tokens, 3) == expected


def test_hypotheses_keep_their_own_count_when_they_change_places():
    state = Repetition.start(1, 2, torch.device("cpu"))
    for parents, tokens in (([0, 1], [4, 5]), ([0, 1], [4, 6]), ([1, 0], [7, 4])):
        state = state.advance(torch.tensor([parents]), torch.tensor([tokens]))
    scores = torch.zeros(1, 2, 10)
    state.forbid_(scores, 3, FORBIDDEN)
    scores = scores[0]
    assert (scores == FORBIDDEN).nonzero().tolist() == [[1, 4]]


@pytest.fixture
def memory_and_model():
    config = ModelConfig(
        d_model=32, num_heads=4, encoder_layers=1, decoder_layers=1, ffn_dim=64, subsampling_channels=4, vocab_size=8
    )
    return torch.randn(1, 60, 32), torch.tensor([60]), Transformer(config).eval()


@pytest.mark.parametrize("strategy", ["greedy", "beam"])
def test_a_decoder_in_a_loop_does_not_run_away(memory_and_model, strategy):
    memory, lens, model = memory_and_model
    with torch.no_grad():
        model.decoder.output.bias[4] = 30.0
    longest = []
    for limit in (1000, 5):
        options = DecodeOptions(strategy, beam_size=3, ctc_weight=0.0, length_bonus=1.0, max_repeats=limit)
        tokens = search(model, memory, lens, options)[0][0].tokens
        longest.append(max((len(list(run)) for _, run in itertools.groupby(tokens)), default=0))
    assert longest[0] == 60
    assert longest[1] <= 5


def test_an_early_end_is_held_against_the_speech_that_ctc_still_hears(memory_and_model, monkeypatch):
    memory, lens, model = memory_and_model
    said = {5: 4, 15: 5, 25: 6, 35: 7, 45: 4, 55: 5}
    path = torch.full((60,), BLANK)
    path[list(said)] = torch.tensor(list(said.values()))
    heard = (torch.nn.functional.one_hot(path, 8) * 12.0).log_softmax(dim=-1)[None]
    monkeypatch.setattr(model, "ctc_log_probs", lambda memory: heard)
    with torch.no_grad():
        model.decoder.output.weight.mul_(0.1)
        model.decoder.output.bias[EOS] = 4.0  # a decoder that always tends to end
    found = [search(model, memory, lens, DecodeOptions(ctc_weight=w))[0][0].tokens for w in (0.0, 0.3)]
    assert found == [[], list(said.values())]
