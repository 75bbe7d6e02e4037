import math

import pytest
import torch

from asr.model.cache import GROWTH
from asr.model.config import PRESETS, ModelConfig
from asr.model.transformer import Transformer

CHOICES = [
    {},
    {"encoder": "conformer", "conv_kernel": 5},
    {"norm_first": False},
    {"positions": "rotary"},
    {"positions": "learned"},
    {"tie_output": False, "d_k": 6, "d_v": 10, "attention_bias": False},
    {"subsampling": 8, "activation": "silu"},
]


def model(**changes) -> Transformer:
    settings = {"d_model": 32, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 2, "ffn_dim": 64}
    return Transformer(ModelConfig(subsampling_channels=4, **(settings | changes))).eval()


def batch(*X_lens: int):
    """Features and tokens of two utterances."""
    return torch.randn(2, 90, 80), torch.tensor(X_lens), torch.randint(4, 32, (2, 6)), torch.tensor([6, 3])


@pytest.mark.parametrize("changes", CHOICES)
def test_forward_gives_log_posteriors_of_both_heads(changes):
    out = model(**changes)(*batch(90, 70))
    assert out.log_probs.shape == (2, 7, 32)
    assert out.lens.tolist() == [7, 4]
    assert out.ctc_log_probs.shape == (2, out.memory_lens[0], 32)
    for log_probs in (out.log_probs, out.ctc_log_probs):
        torch.testing.assert_close(log_probs.exp().sum(dim=-1), torch.ones(log_probs.shape[:2]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("changes", CHOICES)
def test_padding_does_not_change_the_posteriors(changes):
    transformer = model(**changes)
    X, Y = torch.randn(3, 120, 80), torch.randint(4, 32, (3, 9))
    X_lens, Y_lens = torch.tensor([120, 60, 90]), torch.tensor([9, 4, 6])
    together = transformer(X, X_lens, Y, Y_lens)
    for i in range(3):
        n, u = X_lens[i], Y_lens[i]
        alone = transformer(X[i : i + 1, :n], X_lens[i : i + 1], Y[i : i + 1, :u], Y_lens[i : i + 1])
        m = alone.memory_lens[0]
        assert together.memory_lens[i] == m
        torch.testing.assert_close(together.ctc_log_probs[i, :m], alone.ctc_log_probs[0, :m], atol=1e-4, rtol=0)
        torch.testing.assert_close(together.log_probs[i, : u + 1], alone.log_probs[0], atol=1e-4, rtol=0)


def test_a_token_has_no_influence_on_what_comes_before_it():
    transformer = model()
    X, X_lens, Y, Y_lens = torch.randn(1, 90, 80), torch.tensor([90]), torch.randint(4, 32, (1, 8)), torch.tensor([8])
    changed = Y.clone()
    changed[0, 5] = (Y[0, 5] - 4 + 1) % 28 + 4
    before, after = transformer(X, X_lens, Y, Y_lens).log_probs, transformer(X, X_lens, changed, Y_lens).log_probs
    torch.testing.assert_close(before[:, :6], after[:, :6])
    assert (before[:, 6:] - after[:, 6:]).abs().max() > 1e-4


@pytest.mark.parametrize("changes", CHOICES)
def test_the_cached_step_equals_the_full_forward_pass(changes):
    transformer = model(**changes)
    with torch.inference_mode():
        memory, lens = transformer.encoder(torch.randn(3, 90, 80), torch.tensor([90, 60, 0]))
        Y_in = torch.randint(4, 32, (3, 3, 70))  # more steps than the caches have room for at the start
        state = transformer.decoder.start(memory, lens, width=3)
        steps = []
        for t in range(70):
            log_probs, state = transformer.decoder.step(Y_in[:, :, t], state)
            steps.append(log_probs)
        stepped = torch.stack(steps, dim=2)
        for w in range(3):
            torch.testing.assert_close(stepped[:, w], transformer.decoder(Y_in[:, w], memory, lens), atol=1e-5, rtol=0)


@pytest.mark.parametrize("changes", CHOICES)
def test_hypotheses_that_change_places_keep_their_own_past(changes):
    transformer = model(**changes)
    with torch.inference_mode():
        memory, lens = transformer.encoder(torch.randn(2, 90, 80), torch.tensor([90, 60]))
        Y_in = torch.randint(4, 32, (2, 3, 1))
        log_probs, state = transformer.decoder.step(Y_in[:, :, 0], transformer.decoder.start(memory, lens, width=3))
        for step in range(70):
            parents, tokens = torch.randint(3, (2, 3)), torch.randint(4, 32, (2, 3, 1))
            Y_in = torch.cat([Y_in.gather(1, parents[:, :, None].expand_as(Y_in)), tokens], dim=2)
            state = state.reorder(parents)
            log_probs, state = transformer.decoder.step(tokens[:, :, 0], state.compact() if step % 8 == 7 else state)
        assert state.past.filled < 0.8 * 3 * 71  # most of the past is shared, and stored once
        assert state.past.hidden.shape[2] < state.past.filled + 2 * GROWTH * 3
        for w in range(3):
            whole = transformer.decoder(Y_in[:, w], memory, lens)
            torch.testing.assert_close(log_probs[:, w], whole[:, -1], atol=1e-5, rtol=0)


def test_intermediate_ctc_reads_layers_below_the_last():
    transformer = model(encoder_layers=4)
    X, X_lens, Y, Y_lens = batch(90, 70)
    out = transformer(X, X_lens, Y, Y_lens, intermediate=3)
    assert len(out.every_ctc) == 4
    outputs = []
    transformer.encoder(X, X_lens, outputs=outputs)
    for i, log_probs in enumerate(out.every_ctc[1:]):
        torch.testing.assert_close(log_probs, transformer.ctc_log_probs(transformer.encoder.norm(outputs[i])))
    torch.testing.assert_close(out.ctc_log_probs, transformer.ctc_log_probs(transformer.encoder.norm(outputs[3])))
    assert len(transformer(X, X_lens, Y, Y_lens).every_ctc) == 1


def test_a_layer_between_predicts_once_however_many_are_asked_for():
    transformer, (X, X_lens, Y, Y_lens) = model(encoder_layers=2), batch(90, 70)
    first, between = transformer(X, X_lens, Y, Y_lens, intermediate=3).every_ctc
    assert not torch.equal(first, between)


def test_every_parameter_learns():
    transformer = model().train()
    out = transformer(*batch(90, 70))
    (out.log_probs[..., 5].sum() + out.ctc_log_probs[..., 5].sum()).backward()
    for name, parameter in transformer.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name


def test_an_empty_utterance_in_the_batch_has_finite_gradients():
    transformer = model().train()
    out = transformer(*batch(90, 0))
    (out.log_probs.sum() + out.ctc_log_probs.sum()).backward()
    assert all(torch.isfinite(p.grad).all() for p in transformer.parameters())


def test_the_weights_of_every_decoder_layer_are_collected():
    transformer = model()
    memory, lens = transformer.encoder(torch.randn(2, 90, 80), torch.tensor([90, 60]))
    weights = []
    log_probs = transformer.decoder(torch.randint(4, 32, (2, 5)), memory, lens, weights)
    assert [w.shape for w in weights] == [(2, 4, 5, memory.shape[1])] * 2
    torch.testing.assert_close(weights[0].sum(dim=-1), torch.ones(2, 4, 5), atol=1e-5, rtol=0)
    assert (weights[0][1, :, :, lens[1] :] == 0).all()
    assert log_probs.shape == (2, 5, 32)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_builds(name):
    config = ModelConfig.preset(name, encoder_layers=1, decoder_layers=1, vocab_size=40)
    assert Transformer(config).config.d_model == PRESETS[name].d_model


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"encoder": "rnn"}, "model.encoder"),
        ({"subsampling": 3}, "model.subsampling"),
        ({"d_model": 30}, "model.num_heads"),
        ({"dropout": 1.0}, "model.dropout"),
        ({"conv_kernel": 4}, "model.conv_kernel"),
        ({"conv_kernel": -1}, "model.conv_kernel"),
        ({"d_k": -1}, "model.d_k"),
        ({"subsampler": "conv1d_glu", "subsampling_channels": 7}, "model.subsampling_channels"),
        ({"positions": "rotary", "d_k": 3}, "model.positions"),
        ({"vocab_size": 3}, "model.vocab_size"),
        ({"suppressed": (0, -1)}, "model: the special token -1 is not one of model.vocab_size=32"),
        ({"first_timestamp": 32}, "model: the special token 32 is not one of model.vocab_size=32"),
        ({"tokens_per_frame": math.inf, "ctc": False}, "model.tokens_per_frame"),
        ({"tokens_per_frame": math.nan}, "model.tokens_per_frame"),
    ],
)
def test_a_wrong_option_is_named_as_the_user_types_it(wrong, named):
    with pytest.raises(ValueError, match=named):
        ModelConfig(**wrong)


def test_a_transcript_is_as_long_as_frames_and_positions_allow():
    lens = torch.tensor([0, 3, 10])
    assert ModelConfig(tokens_per_frame=0.5).most_tokens(lens).tolist() == [0, 2, 5]
    learned = ModelConfig(positions="learned", max_positions=9, prompt=(2, 4))
    assert learned.most_tokens(lens).tolist() == [0, 3, 7]


def test_an_unknown_preset_is_named():
    with pytest.raises(ValueError, match="tiny"):
        ModelConfig.preset("huge")
