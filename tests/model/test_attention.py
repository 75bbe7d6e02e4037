import math

import pytest
import torch

from asr.model import dot_product
from asr.model.attention import MultiHeadAttention
from asr.model.config import ModelConfig
from asr.model.dot_product import attention_weights, scaled_dot_product_attention
from asr.model.masks import causal_mask, length_mask

X = [[0.5, 0.1, 0.3], [0.7, 0.2, 0.9], [0.6, 0.4, 0.8], [0.8, 0.3, 0.5]]
W_K = [[0.5, 0.1, 0.3], [0.2, 0.7, 0.1], [0.3, 0.1, 0.6]]


def one_head(d: int) -> MultiHeadAttention:
    """One head with identity projections and no bias."""
    module = MultiHeadAttention(ModelConfig(d_model=d, num_heads=1, attention_bias=False, positions="learned")).eval()
    with torch.no_grad():
        for linear in (module.query, module.key, module.value, module.output):
            linear.weight.copy_(torch.eye(d))
    return module


def test_the_worked_example_step_by_step():
    d = 3
    Q = V = X
    K = [[sum(x[i] * W_K[i][j] for i in range(d)) for j in range(d)] for x in X]
    scores = [[sum(q * k for q, k in zip(Q[i], K[j], strict=True)) / math.sqrt(d) for j in range(4)] for i in range(4)]
    masked = [[scores[i][j] if j <= i else -math.inf for j in range(4)] for i in range(4)]
    exponents = [[math.exp(s) for s in row] for row in masked]
    weights = [[e / sum(row) for e in row] for row in exponents]
    output = [[sum(weights[i][j] * V[j][k] for j in range(4)) for k in range(d)] for i in range(4)]
    assert K[0] == pytest.approx([0.36, 0.15, 0.34])
    assert weights[1][:2] == pytest.approx([0.410476, 0.589524], abs=1e-6)
    assert weights[3] == pytest.approx([0.204699, 0.273203, 0.268357, 0.253741], abs=1e-6)
    assert output[2] == pytest.approx([0.610618, 0.246359, 0.704695], abs=1e-6)

    module = one_head(3)
    with torch.no_grad():
        module.key.weight.copy_(torch.tensor(W_K).T)  # a Linear computes x Wᵀ
    x, collected = torch.tensor(X)[None], []
    torch.testing.assert_close(module(x, x, causal_mask(4))[0], torch.tensor(output), atol=1e-6, rtol=0)
    with torch.inference_mode():
        torch.testing.assert_close(module(x, x, causal_mask(4))[0], torch.tensor(output), atol=1e-6, rtol=0)
        module(x, x, causal_mask(4), collected)
    torch.testing.assert_close(collected[0][0, 0], torch.tensor(weights), atol=1e-6, rtol=0)


@pytest.mark.parametrize("training", [True, False])
def test_a_causal_module_attends_as_under_the_causal_mask(training):
    config = ModelConfig(d_model=16, num_heads=2, dropout=0.0)
    causal, free = MultiHeadAttention(config, causal=True), MultiHeadAttention(config)
    free.load_state_dict(causal.state_dict())
    x, collected = torch.randn(2, 9, 16), []
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(causal(x), free(x, mask=causal_mask(9)))
        causal(x, weights=collected)
    assert not collected[0].triu(1).any() and collected[0].tril().gt(0).sum() == 2 * 2 * 45


@pytest.mark.parametrize("training", [True, False])
def test_a_causal_module_may_have_padding_too_and_has_no_window(training):
    config = ModelConfig(d_model=16, num_heads=2, dropout=0.0)
    module, x = MultiHeadAttention(config, causal=True), torch.randn(2, 9, 16)
    with torch.set_grad_enabled(training):
        out = module(x, mask=length_mask(torch.tensor([9, 4]), 9))
        torch.testing.assert_close(out[0], module(x)[0])
        torch.testing.assert_close(out[1, :4], module(x[1:, :4])[0])
        assert not torch.allclose(out[1, 5:], module(x)[1, 5:])
    with pytest.raises(ValueError, match="no window"):
        MultiHeadAttention(config, window=(3, 3), causal=True)


def test_a_dot_product():
    q, k = torch.tensor([0.3, 0.3]), torch.tensor([0.9, 0.9])
    assert (q @ k).item() == pytest.approx(0.54)


def test_attention_is_an_expectation_of_the_values():
    wanted = torch.tensor([1 / 3, 1 / 6, 1 / 4, 1 / 4, 0.0])
    K = wanted.clamp(min=1e-30).log()[None, None, :, None]  # with q = 1 and d_k = 1 the scores are log-weights
    V = torch.randn(1, 1, 5, 7)
    expectation = (wanted[:, None] * V[0, 0]).sum(dim=0)
    out = scaled_dot_product_attention(torch.ones(1, 1, 1, 1), K, V)
    torch.testing.assert_close(out[0, 0, 0], expectation, atol=1e-6, rtol=1e-5)


def test_scores_have_unit_variance_because_of_the_scale():
    Q, K = torch.randn(1, 1, 400, 64), torch.randn(1, 1, 400, 64)
    unscaled = Q @ K.transpose(-2, -1)
    assert unscaled.var().item() == pytest.approx(64, rel=0.1)
    weights = attention_weights(Q, K)
    scores = weights.log() - weights.log().mean(dim=-1, keepdim=True)
    assert scores.var().item() == pytest.approx(1, rel=0.1)
    assert attention_weights(8 * Q, K).amax(dim=-1).mean() > 5 * weights.amax(dim=-1).mean()  # saturated


@pytest.mark.parametrize("training_on_cpu", [True, False])
def test_the_fused_path_and_the_weights_path_agree(training_on_cpu):
    Q, K, V = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 4)
    mask = length_mask(torch.tensor([7, 4]), 7)
    with torch.set_grad_enabled(training_on_cpu):
        for m in (None, mask):
            expected = attention_weights(Q, K, m) @ V
            torch.testing.assert_close(scaled_dot_product_attention(Q, K, V, m), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("mask", [None, length_mask(torch.tensor([7, 4, 1, 6] * 4), 7)])
@torch.inference_mode()
def test_few_queries_of_many_heads_agree_in_bfloat16_with_the_fused_path(mask, monkeypatch):
    Q, K, V = torch.randn(16, 2, 5, 8), torch.randn(16, 7, 2, 8).transpose(1, 2), torch.randn(16, 2, 7, 4)
    given = [x.bfloat16() for x in (Q, K, V)]
    exact = scaled_dot_product_attention(*(x.float() for x in given), mask)
    by_products = scaled_dot_product_attention(*given, mask)
    monkeypatch.setattr(dot_product, "MANY", 33)
    fused = scaled_dot_product_attention(*given, mask)
    assert by_products.dtype == fused.dtype == torch.bfloat16
    assert not torch.equal(by_products, fused)  # they really are two ways
    for out in (by_products, fused):
        torch.testing.assert_close(out.float(), exact, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("training_on_cpu", [True, False])
def test_a_row_masked_out_whole_gives_zeros_and_finite_gradients(training_on_cpu):
    Q, K, V = (torch.randn(2, 2, 4, 8, requires_grad=True) for _ in range(3))
    mask = length_mask(torch.tensor([4, 0]), 4)
    with torch.set_grad_enabled(training_on_cpu):
        out = scaled_dot_product_attention(Q, K, V, mask)
    assert (out[1] == 0).all() and out[0].abs().sum() > 0
    if training_on_cpu:
        out.square().sum().backward()
        assert all(torch.isfinite(t.grad).all() for t in (Q, K, V))
        assert (V.grad[1] == 0).all()


def test_masked_keys_have_no_influence():
    module = MultiHeadAttention(ModelConfig(d_model=16, num_heads=2)).eval()
    x, mask = torch.randn(1, 6, 16), length_mask(torch.tensor([4]), 6)
    changed = x.clone()
    changed[:, 4:] += 100
    torch.testing.assert_close(module(x[:, :4], x, mask), module(x[:, :4], changed, mask))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_multi_head_attention_equals_torchs(masked, bias):
    ours = MultiHeadAttention(ModelConfig(d_model=16, num_heads=4, attention_bias=bias)).eval()
    theirs = torch.nn.MultiheadAttention(16, 4, bias=bias, batch_first=True).eval()
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
        theirs.out_proj.weight.copy_(ours.output.weight)
        if bias:
            theirs.in_proj_bias.normal_()
            for linear, b in zip((ours.query, ours.key, ours.value), theirs.in_proj_bias.chunk(3), strict=True):
                linear.bias.copy_(b)
            theirs.out_proj.bias.normal_()
            ours.output.bias.copy_(theirs.out_proj.bias)
    q, kv, lens = torch.randn(3, 5, 16), torch.randn(3, 7, 16), torch.tensor([7, 3, 5])
    mask = length_mask(lens, 7) if masked else None
    padding = mask[:, 0, 0] if masked else None
    expected, weights = theirs(q, kv, kv, key_padding_mask=padding, average_attn_weights=False)
    collected = []
    torch.testing.assert_close(ours(q, kv, mask), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(ours(q, kv, mask, collected), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(collected[0], weights, atol=1e-5, rtol=0)


def test_heads_have_widths_of_their_own():
    module = MultiHeadAttention(ModelConfig(d_model=16, num_heads=4, d_k=6, d_v=10)).eval()
    assert module.query.weight.shape == (24, 16)
    assert module.value.weight.shape == (40, 16)
    assert module(torch.randn(2, 3, 16), torch.randn(2, 5, 16)).shape == (2, 3, 16)


def test_start_values_follow_xavier():
    normal = MultiHeadAttention(ModelConfig(d_model=256, d_k=64, d_v=256, attention_init="xavier_normal"))
    for linear, width in ((normal.query, 64), (normal.key, 64), (normal.value, 256), (normal.output, 256)):
        assert linear.weight.std().item() == pytest.approx(math.sqrt(2 / (256 + width)), rel=0.02)
    uniform = MultiHeadAttention(ModelConfig(d_model=256, num_heads=4))
    assert uniform.query.weight.abs().max().item() == pytest.approx(math.sqrt(6 / 512), rel=0.01)
