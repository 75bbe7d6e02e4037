import pytest
import torch
from torch.nn.functional import linear

from asr.model.config import ModelConfig
from asr.model.dropout import draw_kept
from asr.model.feed_forward import FeedForward

ACTIVATIONS = {"relu": torch.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}


def config(**options) -> ModelConfig:
    return ModelConfig(**{"d_model": 16, "num_heads": 2, "ffn_dim": 32, "dropout": 0.0} | options)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_feed_forward_is_two_linear_maps_around_an_activation(activation, training):
    ffn = FeedForward(config(activation=activation)).train(training)
    x = torch.randn(2, 5, 16)
    inner = ACTIVATIONS[activation](x @ ffn[0].weight.T + ffn[0].bias)
    torch.testing.assert_close(ffn(x), inner @ ffn[3].weight.T + ffn[3].bias)


@pytest.mark.parametrize("training", [True, False])
def test_the_feed_forward_is_two_one_by_one_convolutions(training):
    ffn = FeedForward(config()).train(training)
    x = torch.randn(2, 5, 16)
    inner = torch.nn.functional.conv1d(x.mT, ffn[0].weight[:, :, None], ffn[0].bias).relu()
    out = torch.nn.functional.conv1d(inner, ffn[3].weight[:, :, None], ffn[3].bias).mT
    torch.testing.assert_close(ffn(x), out, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("frozen", [[], [0], [3]])
def test_the_gradients_are_those_of_its_definition(frozen, p, activation):
    ffn = FeedForward(config(dropout=p, activation=activation)).double()
    for index in frozen:
        ffn[index].requires_grad_(False)
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    expand, _, _, output = ffn

    def by_definition(x):
        inner = ACTIVATIONS[activation](linear(x, expand.weight, expand.bias))
        kept, scale = draw_kept(inner.shape, p)
        return linear(inner * kept * scale, output.weight, output.bias)

    trained, found = [x, *(w for w in ffn.parameters() if w.requires_grad)], []
    for way in (by_definition, ffn):
        torch.manual_seed(2)
        out = way(x)
        found.append([out, *torch.autograd.grad(out.square().sum(), trained)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_in_training_the_hidden_activations_after_relu_are_stored_once():
    ffn, stored = FeedForward(config(dropout=0.3)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: stored.append(t.shape) or t, lambda t: t):
        ffn(torch.randn(2, 5, 16))
    assert stored.count((2, 5, 32)) == 1 and sum(32 in shape for shape in stored) == 3  # the others are weights


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("p", [0.0, 0.1])
def test_under_autocast_it_is_close_to_single_precision(p, activation):
    ffn, x, found = FeedForward(config(dropout=p, activation=activation)), torch.randn(3, 40, 16), []
    for half in (False, True):
        torch.manual_seed(6)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            out = ffn(x)
        assert out.dtype == (torch.bfloat16 if half else torch.float32)
        found.append([out.float(), *torch.autograd.grad(out.float().square().sum(), list(ffn.parameters()))])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 0.02 * one.norm()
