import itertools
from dataclasses import replace

import pytest
import torch

from asr.decode.beam import BeamSearch
from asr.decode.ctc import ctc_greedy
from asr.decode.options import STRATEGIES, DecodeOptions
from asr.decode.phrases import Phrases
from asr.decode.search import search
from asr.model.bigram import Bigram
from asr.model.config import ModelConfig
from asr.model.language_model import LanguageModel
from asr.model.transformer import Transformer
from asr.text.tokenizer import EOS, SOS, CharTokenizer


@pytest.fixture
def transformer() -> Transformer:
    config = ModelConfig(
        d_model=32, num_heads=4, encoder_layers=1, decoder_layers=2, ffn_dim=64, subsampling_channels=4, vocab_size=7
    )
    model = Transformer(config).eval()
    with torch.no_grad():  # sharper than initialised, so that hypotheses differ
        model.decoder.output.bias.normal_()
        model.ctc.weight.mul_(4)
    model.bigram = Bigram.of([[1, 4, 5], [4, 4, 6, 1], [5]], config)
    return model


X, X_LENS = torch.randn(3, 60, 80, generator=torch.Generator().manual_seed(1)), torch.tensor([60, 23, 40])


@pytest.fixture
def language_model(transformer) -> LanguageModel:
    torch.manual_seed(5)
    model = LanguageModel(transformer.config).eval()
    with torch.no_grad():
        model.output.bias.normal_()
    return model


def search_features(model: Transformer, X, X_lens, options: DecodeOptions, language_model=None):
    return search(model, *model.encoder(X, X_lens), options, language_model)


def totals(log_probs, tokens: torch.Tensor) -> torch.Tensor:
    """The sums `(N,)` of the log-posteriors `(N, n + 1, V)` of `tokens` `(N, n)` and of the end."""
    ended = torch.nn.functional.pad(tokens, (0, 1), value=EOS)
    return log_probs.double().gather(2, ended[:, :, None]).sum(dim=(1, 2))


def scores(model: Transformer, memory, tokens: torch.Tensor, ctc_weight: float) -> torch.Tensor:
    """The joint scores `(N,)` of transcripts `(N, n)`, by the full forward pass and torch's own CTC."""
    N, n = tokens.shape
    lens = torch.full((N,), memory.shape[1])
    started = torch.nn.functional.pad(tokens, (1, 0), value=SOS)
    attention = totals(model.decoder(started, memory.expand(N, -1, -1), lens), tokens)
    ctc = model.ctc_log_probs(memory).transpose(0, 1).double().expand(-1, N, -1)
    loss = torch.nn.functional.ctc_loss(ctc, tokens, lens, torch.full((N,), n), reduction="none")
    return (1 - ctc_weight) * attention - ctc_weight * loss if ctc_weight else attention


def score(model: Transformer, memory, tokens: list[int], ctc_weight: float) -> float:
    return scores(model, memory, torch.tensor([tokens], dtype=torch.long), ctc_weight).item()


def of_every_length(longest: int) -> list[torch.Tensor]:
    """All transcripts of up to `longest` tokens, those of each length together, `(N, n)`."""
    lengths = (list(itertools.product((1, 4, 5, 6), repeat=n)) for n in range(longest + 1))
    return [torch.tensor(each, dtype=torch.long) for each in lengths]


@pytest.mark.parametrize(
    ("strategy", "ctc_weight"),
    [("beam", 0.0), ("beam", 0.3), ("beam", 1.0), ("ctc", 1.0), ("rescore", 0.3), ("rescore", 1.0)],
)
@pytest.mark.parametrize(("lm_weight", "ilm_weight"), [(0.0, 0.0), (0.7, 0.0), (0.7, 0.2), (0.0, 0.2)])
@torch.inference_mode()
def test_a_wide_beam_finds_what_exhaustive_search_finds(
    transformer, language_model, strategy, ctc_weight, lm_weight, ilm_weight
):
    memory, lens = transformer.encoder(X[1:2, :23], X_LENS[1:2])
    assert lens.item() == 5 and memory.shape[1] == 5
    memory, lens = memory[:, :4], torch.tensor([4])

    def joint(tokens: torch.Tensor) -> torch.Tensor:
        Y = torch.nn.functional.pad(tokens, (1, 0), value=SOS)
        lm = totals(language_model(Y), tokens)
        ilm = totals(transformer.bigram.log_probs[Y], tokens) if lm_weight and ctc_weight < 1 else 0.0
        of_the_model = scores(transformer, memory, tokens, ctc_weight)
        return of_the_model + lm_weight * lm - ilm_weight * ilm + 0.5 * tokens.shape[1]

    scored = sorted(
        (pair for tokens in of_every_length(4) for pair in zip(joint(tokens).tolist(), tokens.tolist(), strict=True)),
        reverse=True,
    )
    weights = {"ctc_weight": ctc_weight, "lm_weight": lm_weight, "ilm_weight": ilm_weight, "length_bonus": 0.5}
    options = DecodeOptions(strategy, beam_size=256, nbest=3, **weights)
    found = search(transformer, memory, lens, options, language_model)[0]
    assert [h.tokens for h in found] == [y for _, y in scored[:3]]
    assert [h.score for h in found] == pytest.approx([s for s, _ in scored[:3]], abs=1e-4)


def test_greedy_search_adds_no_language_model_and_subtracts_none(transformer, language_model):
    options = DecodeOptions("greedy", lm_weight=0.7, ilm_weight=5.0)
    assert search_features(transformer, X, X_LENS, options, language_model) == search_features(
        transformer, X, X_LENS, DecodeOptions("greedy")
    )


def test_nothing_is_subtracted_where_the_transcripts_are_not_known(transformer, language_model):
    transformer.bigram = None
    with pytest.raises(ValueError, match="ilm_weight: this model has no bigram"):
        search_features(transformer, X, X_LENS, DecodeOptions(ilm_weight=0.2), language_model)
    search_features(transformer, X, X_LENS, DecodeOptions(ilm_weight=0.2))  # and no language model takes its place


def test_greedy_search_adds_no_length_bonus(transformer):
    plain = search_features(transformer, X, X_LENS, DecodeOptions("greedy"))
    assert search_features(transformer, X, X_LENS, DecodeOptions("greedy", length_bonus=5.0)) == plain


def test_what_is_rescored_is_what_ctc_finds_with_these_weights(transformer, language_model):
    """Until the decoder rescores, CTC has its weight, too, so that the language model is no stronger in comparison."""
    weights = {"beam_size": 3, "nbest": 3, "lm_weight": 0.7, "length_bonus": 0.5}
    first = search_features(transformer, X, X_LENS, DecodeOptions("ctc", **weights), language_model)
    found = search_features(transformer, X, X_LENS, DecodeOptions("rescore", ctc_weight=0.1, **weights), language_model)
    for ours, theirs in zip(found, first, strict=True):
        assert sorted(h.tokens for h in ours) == sorted(h.tokens for h in theirs)
    weights |= {"beam_size": 40, "nbest": 40, "ilm_weight": 0.4}
    found, joint = (
        {tuple(h.tokens): h.score for h in search_features(transformer, X[1:2], X_LENS[1:2], each, language_model)[0]}
        for each in (DecodeOptions("rescore", **weights), DecodeOptions(**weights))
    )
    both = found.keys() & joint
    assert both and all(found[tokens] == pytest.approx(joint[tokens], abs=1e-3) for tokens in both)


@pytest.mark.parametrize("ctc_weight", [0.0, 0.3, 1.0])
@torch.inference_mode()
def test_reported_scores_are_the_models(transformer, ctc_weight):
    memory, lens = transformer.encoder(X[:1], X_LENS[:1])
    for hypothesis in search(transformer, memory, lens, DecodeOptions(ctc_weight=ctc_weight, nbest=5))[0]:
        assert hypothesis.score == pytest.approx(score(transformer, memory, hypothesis.tokens, ctc_weight), abs=1e-4)


@pytest.mark.parametrize("beam_size", [1, 2, 4, 16, 64])
@torch.inference_mode()
def test_exhaustive_search_is_never_beaten_and_a_full_beam_equals_it(transformer, beam_size):
    memory, lens = transformer.encoder(X[1:2, :23], X_LENS[1:2])
    memory, lens = memory[:, :4], torch.tensor([4])
    best = max(scores(transformer, memory, tokens, 0.3).max().item() for tokens in of_every_length(4))
    found = search(transformer, memory, lens, DecodeOptions(beam_size=beam_size))[0][0].score
    assert found <= best + 1e-4
    if beam_size == 64:
        assert found == pytest.approx(best, abs=1e-4)


@pytest.mark.parametrize(
    ("strategy", "beam_size"), [("beam", 9), ("ctc", 9), ("ctc", 1), ("rescore", 9), ("greedy", 1)]
)
def test_what_the_tokens_add_makes_the_score_up_to_the_end(transformer, language_model, strategy, beam_size):
    options = DecodeOptions(strategy, beam_size, nbest=beam_size)
    found = search_features(transformer, X[:1], X_LENS[:1], options, language_model)[0]
    assert any(hypothesis.tokens for hypothesis in found)
    for hypothesis in found:
        assert len(hypothesis.token_scores) == len(hypothesis.tokens)
        assert sum(hypothesis.token_scores) >= hypothesis.score - 1e-6  # the rest is what ending costs


@pytest.mark.parametrize(
    "options",
    [
        DecodeOptions(beam_size=5, nbest=5),
        DecodeOptions("rescore", beam_size=5, nbest=5),
        DecodeOptions("ctc", beam_size=5, nbest=5),
        DecodeOptions("ctc", beam_size=1),
        DecodeOptions("greedy"),
    ],
)
def test_batched_equals_alone(transformer, language_model, options):
    together = search_features(transformer, X, X_LENS, options, language_model)
    for i, n in enumerate(X_LENS):
        alone = search_features(transformer, X[i : i + 1, :n], X_LENS[i : i + 1], options, language_model)[0]
        assert [h.tokens for h in together[i]] == [h.tokens for h in alone]
        assert [h.score for h in together[i]] == pytest.approx([h.score for h in alone], abs=1e-4)


@pytest.mark.parametrize("seed", [4, 9, 10, 14, 21])
def test_batched_equals_alone_where_ctc_hears_labels_everywhere(transformer, seed):
    with torch.no_grad():
        transformer.ctc.weight.mul_(8)
    memory, lens = 2 * torch.randn(2, 80, 32, generator=torch.Generator().manual_seed(seed)), torch.tensor([80, 40])
    options = DecodeOptions(beam_size=3, ctc_weight=0.5)
    together = search(transformer, memory, lens, options)
    for i, n in enumerate(lens):
        alone = search(transformer, memory[i : i + 1, :n], lens[i : i + 1], options)[0]
        assert together[i][0].tokens == alone[0].tokens
        assert together[i][0].score == pytest.approx(alone[0].score, rel=1e-5)


@pytest.mark.parametrize("strategy", ["beam", "rescore", "ctc"])
def test_it_searches_within_a_training_in_half_precision(transformer, language_model, strategy):
    options = DecodeOptions(strategy, beam_size=5)
    expected = search_features(transformer, X, X_LENS, options, language_model)
    with torch.autocast("cpu", torch.bfloat16):
        found = search_features(transformer, X, X_LENS, options, language_model)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0].score == pytest.approx(theirs[0].score, rel=0.02)


def test_when_those_who_are_done_leave_the_batch_makes_no_difference(transformer, language_model, monkeypatch):
    options = DecodeOptions(beam_size=5, nbest=5, length_bonus=0.5)
    expected = search_features(transformer, X, X_LENS, options, language_model)
    for looks, leaving in [((1, 1), 100), ((1, 3), 1), ((8, 8), 100), ((1000, 1000), 1)]:
        monkeypatch.setattr("asr.decode.beam.LOOKS", {"cpu": looks})
        monkeypatch.setattr("asr.decode.beam.LEAVING", leaving)
        for ours, theirs in zip(
            search_features(transformer, X, X_LENS, options, language_model), expected, strict=True
        ):
            assert [h.tokens for h in ours] == [h.tokens for h in theirs]
            assert [h.score for h in ours] == pytest.approx([h.score for h in theirs], abs=1e-4)


def test_what_a_subtracted_score_brings_back_is_waited_for(transformer, language_model, monkeypatch):
    with torch.no_grad():
        for output in (transformer.decoder.output, language_model.output):
            output.weight.zero_()
            output.bias.zero_()
        transformer.decoder.output.bias[EOS] = 0.5
        transformer.bigram.log_probs.zero_()[5, 6] = -10.0  # 6 after 5 gains, 5 by itself does not
    options = DecodeOptions(beam_size=5, ctc_weight=0.0, lm_weight=0.1, ilm_weight=0.5)
    for looks in ((1, 1), (1000, 1000)):
        monkeypatch.setattr("asr.decode.beam.LOOKS", {"cpu": looks})
        best = search_features(transformer, X[1:2, :23], X_LENS[1:2], options, language_model)[0][0]
        assert best.tokens == [5, 6, 5, 6]


def test_what_its_bonus_would_not_bring_back_is_not_waited_for(transformer, monkeypatch):
    made, advance = [], BeamSearch.advance
    monkeypatch.setattr(BeamSearch, "advance", lambda self, step: (made.append(step), advance(self, step)))
    with torch.no_grad():
        transformer.decoder.output.bias[EOS] = 3.0
    memory, lens = torch.randn(1, 200, 32), torch.tensor([200])
    found, steps = [], []
    for catching_up in (10, 200):
        monkeypatch.setattr("asr.decode.beam.CATCHING_UP", catching_up)
        found.append(search(transformer, memory, lens, DecodeOptions(ctc_weight=0.0, length_bonus=0.5)))
        steps.append(len(made) - sum(steps))
    assert found[0] == found[1]
    assert steps[0] < steps[1] / 2


@pytest.mark.parametrize(
    ("likely", "options", "expected"),
    [
        ({SOS: {EOS: 0.6, 4: 0.39}, 4: {EOS: 0.99}}, {"nbest": 2}, [[], [4]]),  # the second does not overtake the best
        ({SOS: {EOS: 0.01, 4: 0.98}, 4: {EOS: 0.99}}, {"length_bonus": -1.0}, [[4]]),  # ending costs no further penalty
        ({SOS: {EOS: 0.9, 4: 0.01}, 4: {5: 0.99}, 5: {6: 0.99}, 6: {EOS: 0.99}}, {"phrases": "abc"}, [[4, 5, 6]]),
    ],
)
def test_an_utterance_is_not_done_while_its_best_may_still_be_overtaken(
    transformer, monkeypatch, likely, options, expected
):
    """Uses a decoder with a fixed distribution after each token."""
    following = torch.full((7, 7), 1e-6)
    for token, probabilities in likely.items():
        following[token, list(probabilities)] = torch.tensor(list(probabilities.values()))
    monkeypatch.setattr(transformer.decoder, "step", lambda tokens, state: (following[tokens].log(), state))
    monkeypatch.setattr("asr.decode.beam.LOOKS", {"cpu": (1, 1)})
    options = DecodeOptions(ctc_weight=0.0, phrase_weight=2.0, **options)
    phrases = Phrases.of([["abc"]], 2.0, CharTokenizer(list("abc"))) if options.phrases else None
    found = search(transformer, torch.randn(1, 9, 32), torch.tensor([9]), options, phrases=phrases)
    assert [h.tokens for h in found[0]] == expected


def test_greedy_is_a_beam_of_one(transformer):
    greedy = search_features(transformer, X, X_LENS, DecodeOptions("greedy"))
    beam = search_features(transformer, X, X_LENS, DecodeOptions(beam_size=1, ctc_weight=0.0))
    assert greedy == beam


@torch.inference_mode()
def test_greedy_takes_the_likeliest_token_at_each_step(transformer):
    memory, lens = transformer.encoder(X[:1], X_LENS[:1])
    tokens: list[int] = []
    while len(tokens) < lens.item():
        log_probs = transformer.decoder(torch.tensor([[SOS, *tokens]]), memory, lens)[0, -1]
        log_probs[[0, SOS]] = -torch.inf
        tokens.append(log_probs.argmax().item())
        if tokens[-1] == EOS:
            break
    found = search(transformer, memory, lens, DecodeOptions("greedy", max_repeats=1000))[0][0]
    assert found.tokens == [t for t in tokens if t != EOS]
    found = search(transformer, memory, lens, DecodeOptions("ctc", beam_size=1))  # and CTC at each frame
    assert found == ctc_greedy(transformer.ctc_log_probs(memory), lens)


@pytest.mark.parametrize("strategy", ["beam", "greedy"])
@torch.inference_mode()
def test_a_prompt_of_several_tokens_is_read_before_the_first_is_written(transformer, strategy):
    prompted = Transformer(replace(transformer.config, prompt=(SOS, 6, 4))).eval()
    prompted.load_state_dict(transformer.state_dict())
    options = DecodeOptions(strategy, ctc_weight=0.0)
    for (best, *_), memory, n in zip(
        search_features(prompted, X, X_LENS, options), *prompted.encoder(X, X_LENS), strict=True
    ):
        log_probs = prompted.decoder(torch.tensor([[SOS, 6, 4, *best.tokens]]), memory[None], n[None])[:, 2:]
        assert best.score == pytest.approx(
            totals(log_probs, torch.tensor([best.tokens], dtype=torch.long)).item(), abs=1e-4
        )


@pytest.mark.parametrize("ctc_weight", [0.0, 0.3])
def test_what_does_not_begin_a_transcript_may_stand_further_on(transformer, ctc_weight):
    with torch.no_grad():
        transformer.decoder.output.bias[5] += 3.0
    options, found = DecodeOptions(beam_size=9, nbest=9, ctc_weight=ctc_weight), {}
    for first in ((), (5, EOS)):
        transformer.config = replace(transformer.config, suppressed_first=first)
        found[first] = [h.tokens for best in search_features(transformer, X, X_LENS, options) for h in best]
    assert [] in found[()] and any(tokens[:1] == [5] for tokens in found[()])
    assert all(tokens and tokens[0] != 5 for tokens in found[5, EOS])
    assert any(5 in tokens for tokens in found[5, EOS])


def test_what_ctc_cannot_align_is_not_found(transformer):
    found = search_features(transformer, X[:1, :11], torch.tensor([11]), DecodeOptions(beam_size=40, nbest=40))[0]
    assert all(h.score > -1e4 for h in found)
    assert [4, 4] not in [h.tokens for h in found]  # two frames have no room for the blank between them


def test_a_model_that_diverged_gives_the_empty_hypothesis(transformer):
    with torch.no_grad():
        transformer.decoder.output.bias.fill_(torch.nan)
    assert [best[0].tokens for best in search_features(transformer, X, X_LENS, DecodeOptions())] == [[], [], []]


def test_a_hypothesis_is_never_longer_than_the_memory(transformer):
    with torch.no_grad():
        transformer.decoder.output.bias[EOS] = -20.0  # a decoder that never tends to end, with a bonus per token
    found = search_features(transformer, X, X_LENS, DecodeOptions(beam_size=3, ctc_weight=0.0, length_bonus=10.0))
    memory_lens = transformer.encoder(X, X_LENS)[1]
    assert [len(best[0].tokens) for best in found] == memory_lens.tolist()


def test_a_hypothesis_is_never_longer_than_the_language_model_has_positions_for(transformer):
    short = LanguageModel(replace(transformer.config, positions="learned", max_positions=4)).eval()
    options = DecodeOptions(beam_size=3, ctc_weight=0.0, lm_weight=0.1, length_bonus=50.0)
    assert len(search_features(transformer, X, X_LENS, options)[0][0].tokens) > 3
    assert len(search_features(transformer, X, X_LENS, options, short)[0][0].tokens) == 3


def test_a_length_bonus_lengthens(transformer):
    lengths = [
        [len(best[0].tokens) for best in search_features(transformer, X, X_LENS, DecodeOptions(length_bonus=bonus))]
        for bonus in (0.0, 1.0, 3.0)
    ]
    assert sum(lengths[0]) < sum(lengths[1]) < sum(lengths[2])


@pytest.mark.parametrize("strategy", ["beam", "rescore", "greedy"])
@torch.inference_mode()
def test_what_is_masked_out_whole_has_the_score_that_it_has_alone(transformer, strategy):
    """As is noise in which CTC hears nothing, in a batch with a longer recording."""
    memory, lens, options = torch.randn(1, 9, 32), torch.tensor([0]), DecodeOptions(strategy)
    alone = search(transformer, memory[:, :4], lens, options)[0][0]
    assert search(transformer, memory, lens, options)[0][0].score == pytest.approx(alone.score, abs=1e-5)


def test_an_utterance_without_frames_gives_the_empty_hypothesis(transformer):
    for strategy in STRATEGIES:
        found = search_features(transformer, X[:2, :5], torch.tensor([5, 0]), DecodeOptions(strategy))
        assert [best[0].tokens for best in found] == [[], []]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"strategy": "viterbi"}, "strategy"),
        ({"beam_size": 0}, "beam_size"),
        ({"ctc_weight": 2}, "ctc_weight"),
        ({"lm_weight": -1}, "lm_weight"),
        ({"lm_weight": float("nan")}, "lm_weight"),
        ({"length_bonus": float("inf")}, "length_bonus"),
        ({"ilm_weight": -1}, "ilm_weight"),
        ({"max_repeats": 1}, "max_repeats"),
        ({"nbest": 11}, "nbest"),
    ],
)
def test_wrong_options_are_named(wrong, named):
    with pytest.raises(ValueError, match=named):
        DecodeOptions(**wrong)
