"""Low-rank adaptation: W + B A in place of every linear layer's W."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from asr.model.layers import layers_of
from asr.model.lora import add_low_rank, merge_low_rank
from asr.model.transformer import Transformer
from tests.kinds import TINY


@pytest.fixture(params=["transformer", "conformer"])
def model(request):
    return Transformer(replace(TINY, encoder=request.param)).eval()


@pytest.fixture
def inputs():
    X, Y = torch.randn(2, 60, TINY.input_dim), torch.randint(4, TINY.vocab_size, (2, 5))
    return X, torch.tensor([60, 41]), Y, torch.tensor([5, 3])


def learn(model, inputs) -> None:
    """Updates everything that has a gradient, twice, since the first update moves only B."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(*inputs).log_probs[..., 4].sum().backward()
        optimizer.step()


def test_a_layer_gives_w_x_and_b_a_x():
    layers = nn.ModuleList(Transformer(TINY).decoder.layers)
    add_low_rank(layers, 3)
    linear = layers[0].ffn[0]
    added, weight = linear.parametrizations.weight[0], linear.parametrizations.weight.original
    nn.init.normal_(added.up)
    x = torch.randn(5, TINY.d_model)
    expected = x @ weight.T + (x @ added.down.T) @ added.up.T + linear.bias
    torch.testing.assert_close(linear(x), expected, atol=1e-5, rtol=1e-5)
    assert added.down.shape == (3, TINY.d_model) and added.up.shape == (TINY.ffn_dim, 3)


def test_a_rank_that_no_matrix_has_is_refused(model):
    with pytest.raises(ValueError, match=f"lora_rank={TINY.d_model + 1} is more .*, {TINY.d_model}: train all weights"):
        add_low_rank(model, TINY.d_model + 1)
    add_low_rank(model, TINY.d_model)


def test_at_first_nothing_is_added(model, inputs):
    before = model(*inputs).log_probs
    add_low_rank(model, 4)
    assert torch.equal(model(*inputs).log_probs, before)


def test_every_linear_layer_learns_and_nothing_else_does(model, inputs):
    layers = [m for layer in layers_of(model) for m in layer.modules() if isinstance(m, nn.Linear)]
    add_low_rank(model, 2)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    learn(model, inputs)
    moved = [name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])]
    assert len(moved) == 2 * len(layers)
    assert all(name.endswith((".parametrizations.weight.0.up", ".parametrizations.weight.0.down")) for name in moved)


def test_what_is_named_is_trained_whole_and_what_was_frozen_stays(model, inputs):
    model.encoder.layers[0].requires_grad_(False)
    add_low_rank(model, 2, trained=("decoder.embedding.", "encoder.layers.0.", "encoder.layers.1.ffn_residual."))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {"decoder.embedding.weight", "encoder.layers.1.ffn_residual.norm.weight"} <= trained
    assert not any(name.startswith("encoder.layers.0.") for name in trained)
    assert all(".parametrizations.weight.0." in name for name in trained if name.startswith("decoder.layers."))


def test_merged_weights_are_those_of_a_model_without(model, inputs):
    plain = Transformer(model.config).eval()
    add_low_rank(model, 2)
    learn(model, inputs)
    plain.load_state_dict(merge_low_rank(model.state_dict()))
    torch.testing.assert_close(plain(*inputs).log_probs, model(*inputs).log_probs, atol=1e-5, rtol=1e-5)
    weights = plain.state_dict()
    assert merge_low_rank(weights) == weights
