import pytest
import torch

from asr.model.attention import MultiHeadAttention
from asr.model.config import ModelConfig
from asr.model.dot_product import attention_weights
from asr.model.dropout import draw_kept
from asr.model.masks import additive_mask, causal_mask, length_mask
from asr.model.plain_attention import plain_attention

PADDING = length_mask(torch.tensor([7, 4]), 7)
MASKS = {
    "none": None,
    "padding": PADDING,
    "padding and future": PADDING | causal_mask(7),
    "additive": additive_mask(PADDING, torch.float64),
}
B, H, L, D = 2, 3, 7, 8


def heads(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def expected(Q, K, V, mask, p):
    """softmax(Q Kᵀ / √d) V by the definition, with the weights that dropout keeps."""
    weights = attention_weights(*(x.transpose(1, 2) for x in (Q, K)), mask)
    kept, scale = draw_kept(weights.shape, p)
    return (weights * kept * scale @ V.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_it_is_attention_with_its_gradients(mask, p):
    parts = heads(B, L, H, D), heads(B, L, H, D), heads(B, L, H, 5)
    gradient, found = torch.randn(B, L, H, 5, dtype=torch.float64), []
    for way in (lambda: expected(*parts, mask, p), lambda: plain_attention(*parts, H, mask, p)):
        torch.manual_seed(4)
        out = way()
        found.append([out, *torch.autograd.grad(out, parts, gradient)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert found[0][0].abs().sum() > 1


@pytest.mark.parametrize("together", ["queries, keys, values", "queries | keys, values"])
def test_parts_that_one_product_computed_stay_in_one_tensor(together):
    Q, K, V = heads(B, L, H, D), heads(B, L, H, D), heads(B, L, H, D)
    joined = torch.cat([Q, K, V], dim=2) if "|" not in together else torch.cat([K, V], dim=2)
    given = (joined, None, None) if "|" not in together else (Q, joined, None)
    gradient = torch.randn(B, L, H, D, dtype=torch.float64)
    found = [
        [out, *torch.autograd.grad(out, (Q, K, V), gradient)]
        for out in (plain_attention(*given, H, PADDING), plain_attention(Q, K, V, H, PADDING))
    ]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_keys_may_be_more_or_fewer_than_queries():
    Q, K, V = heads(B, 4, H, D), heads(B, L, H, D), heads(B, L, H, D)
    torch.testing.assert_close(plain_attention(Q, K, V, H, PADDING), expected(Q, K, V, PADDING, 0.0))


def test_queries_that_see_no_keys_give_zeros_and_no_gradients():
    parts = heads(B, L, H, D), heads(B, L, H, D), heads(B, L, H, D)
    out = plain_attention(*parts, H, length_mask(torch.tensor([7, 0]), 7), 0.2)
    assert (out[1] == 0).all() and out[0].abs().sum() > 0
    out.square().sum().backward()
    assert all((x.grad[1] == 0).all() and x.grad[0].abs().sum() > 0 for x in parts)


@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("widths", [{}, {"d_k": 6, "d_v": 10}])
@pytest.mark.parametrize("kind", ["self", "causal", "cross"])
def test_training_computes_what_evaluation_does(kind, widths, rotary):
    config = ModelConfig(d_model=16, num_heads=4, dropout=0.0, **widths)
    module = MultiHeadAttention(config, rotary=rotary and kind != "cross", causal=kind == "causal")
    x, memory = torch.randn(B, 5, 16), torch.randn(B, L, 16)
    keys, mask = (memory, PADDING) if kind == "cross" else (None, length_mask(torch.tensor([5, 3]), 5))
    found = []
    for training in (True, False):
        out = module.train(training)(x, keys, mask)
        gradients = torch.autograd.grad(out, list(module.parameters()), torch.ones_like(out), allow_unused=True)
        found.append([out, *gradients])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_under_autocast_it_is_close_to_single_precision(p):
    config = ModelConfig(d_model=64, num_heads=2, dropout=p, key_bias=False)
    module, x, found = MultiHeadAttention(config), torch.randn(3, 40, 64), []
    for half in (False, True):
        torch.manual_seed(6)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            out = module(x, mask=length_mask(torch.tensor([40, 30, 20]), 40))
        assert out.dtype == (torch.bfloat16 if half else torch.float32)
        found.append([out.float(), *torch.autograd.grad(out.float().square().sum(), list(module.parameters()))])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 0.02 * one.norm()
