from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from asr.model.config import ModelConfig
from asr.model.dot_product import scaled_dot_product_attention
from asr.model.dropout import Dropout
from asr.model.encoder import Encoder
from asr.model.local_attention import local_attention
from asr.model.masks import length_mask, window_mask


def test_the_window_of_a_frame():
    inside = ~window_mask(5, left=2, right=1)
    assert inside.int().tolist() == [
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [0, 1, 1, 1, 1],
        [0, 0, 1, 1, 1],
    ]


@pytest.mark.parametrize(("left", "right"), [(3, 5), (10, 0), (0, 4), (70, 40), (400, 400)])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("training", [True, False])  # the product written out, and torch's kernel
def test_blocks_give_what_full_attention_gives_under_the_windows_mask(left, right, length, training):
    Q, K, V = (torch.randn(2, 3, length, d) for d in (8, 8, 6))
    mask = length_mask(torch.tensor([length, length // 2]), length)
    with torch.set_grad_enabled(training):
        got = local_attention(Q, K, V, left, right, mask)
        want = scaled_dot_product_attention(Q, K, V, mask | window_mask(length, left, right))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_more_blocks_than_are_computed_together_give_the_same(monkeypatch):
    Q, K, V = (torch.randn(2, 3, 300, 8) for _ in range(3))  # five blocks
    at_once = local_attention(Q, K, V, 3, 5)
    for together in (1, 2, 4):
        monkeypatch.setitem(local_attention.__globals__, "TOGETHER", together)
        torch.testing.assert_close(local_attention(Q, K, V, 3, 5), at_once)


@pytest.mark.parametrize(("left", "right"), [(3, 5), (170, 140), (400, 400)])
def test_weights_are_dropped_whatever_the_window(left, right):
    Q, V = torch.zeros(2, 3, 300, 8), torch.ones(2, 3, 300, 1)
    out = local_attention(Q, Q, V, left, right, dropout=Dropout(0.5))
    assert ((out - 1).abs() > 0.01).float().mean() > 0.5
    assert out.mean().item() == pytest.approx(1.0, abs=0.03)


def test_torch_compile_compiles_it_once_for_all_lengths():
    counter = CompileCounter()
    compiled = torch.compile(local_attention, backend=counter, dynamic=True)
    for length in (100, 300, 700, 2000):
        Q, K, V = (torch.randn(2, 2, length, 8) for _ in range(3))
        mask = length_mask(torch.tensor([length, length - 30]), length)
        torch.testing.assert_close(compiled(Q, K, V, 10, 5, mask), local_attention(Q, K, V, 10, 5, mask))
    assert counter.frame_count == 1


@pytest.mark.parametrize("encoder", ["transformer", "conformer"])
@pytest.mark.parametrize("positions", ["sinusoidal", "rotary"])
def test_a_window_that_covers_the_input_changes_nothing(encoder, positions):
    config = ModelConfig(
        encoder=encoder, positions=positions, d_model=32, encoder_layers=2, subsampling_channels=4, ffn_dim=64
    )
    full = Encoder(config).eval()
    local = Encoder(replace(config, attention_left=100, attention_right=100)).eval()
    local.load_state_dict(full.state_dict())
    X, X_lens = torch.randn(2, 400, 80), torch.tensor([400, 250])
    want, lens = full(X, X_lens)
    got, _ = local(X, X_lens)
    for b, n in enumerate(lens):
        torch.testing.assert_close(got[b, :n], want[b, :n], atol=1e-5, rtol=1e-5)
    gradients = []
    for module in (full, local):
        memory, _ = module(X, X_lens)
        memory[0].square().mean().backward()
        gradients.append(module.layers[0].attention.query.weight.grad)
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-4)


def test_what_lies_outside_every_window_is_not_seen():
    shape = {"d_model": 32, "subsampling_channels": 4, "ffn_dim": 64}
    config = ModelConfig(**shape, encoder_layers=2, attention_left=4, attention_right=2)
    encoder = Encoder(config).eval()
    X = torch.randn(1, 400, 80)
    changed = X.clone()
    changed[:, 200:] += 1.0  # from encoder frame 49 on
    before, _ = encoder(X, torch.tensor([400]))
    after, _ = encoder(changed, torch.tensor([400]))
    torch.testing.assert_close(before[:, :44], after[:, :44])  # two layers look 2 frames ahead each
    assert (before[:, 50:] - after[:, 50:]).abs().amax() > 0.01


def test_the_weights_are_those_of_the_window():
    config = ModelConfig(d_model=32, encoder_layers=1, subsampling_channels=4, attention_left=3, attention_right=0)
    encoder = Encoder(config).eval()
    weights, X, X_lens = [], torch.randn(1, 200, 80), torch.tensor([200])
    memory, lens = encoder(X, X_lens, weights)
    torch.testing.assert_close(memory, encoder(X, X_lens)[0], atol=1e-5, rtol=1e-5)
    assert not weights[0][0, :, window_mask(int(lens), 3, 0)].any()
    torch.testing.assert_close(weights[0].sum(dim=-1), torch.ones(1, 4, int(lens)))


@pytest.mark.parametrize("window", [(0, 0), (-1, 3), (None, 4)])
def test_a_window_without_a_frame_is_refused(window):
    with pytest.raises(ValueError, match=r"model\.attention_left"):
        ModelConfig(attention_left=window[0], attention_right=window[1])
