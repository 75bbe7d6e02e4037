"""The kernel is a GPU's; what it is told can be checked anywhere, by one that computes a sequence after the other."""

from dataclasses import replace

import pytest
import torch

from asr.model import flash_attention as module
from asr.model.config import ModelConfig
from asr.model.dot_product import scaled_dot_product_attention
from asr.model.dropout import Dropout
from asr.model.flash_attention import fits, flash_attention, sequence_ends
from asr.model.masks import length_mask
from asr.model.transformer import Transformer

LENS = torch.tensor([7, 4, 0, 1])
KERNEL = torch.ops.aten._flash_attention_forward
on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < module.OLDEST,
    reason="the kernel is a GPU's, from Ampere on",
)


def one_after_another(Q, K, V, query_ends, key_ends, longest_query, longest_key, p, causal, debug):
    """What the kernel computes: rows `(L, H, d)`, of which those between two ends are a sequence."""
    assert Q.shape[0] == query_ends[-1] and K.shape[0] == key_ends[-1] and not p and not causal
    outs = []
    for i in range(len(query_ends) - 1):
        q, k, v = (x[a[i] : a[i + 1]].transpose(0, 1) for x, a in ((Q, query_ends), (K, key_ends), (V, key_ends)))
        assert q.shape[1] <= longest_query and k.shape[1] <= longest_key
        outs.append(((q @ k.transpose(1, 2) / q.shape[2] ** 0.5).softmax(dim=2) @ v).transpose(0, 1))
    return torch.cat(outs), None, None, None, None


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """Every device has the kernel, for all heads; the arguments with which it was called."""
    monkeypatch.setattr("asr.model.encoder.sequence_ends", module._ends)
    monkeypatch.setattr("asr.model.decoder.sequence_ends", module._ends)
    monkeypatch.setattr("asr.model.attention.fits", lambda Q, V: True)
    found = []

    def kernel(*args):
        found.append(args)
        return one_after_another(*args)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel, raising=False)
    return found


def test_torch_has_the_kernel_as_it_is_called():
    names = [argument.name for argument in KERNEL.default._schema.arguments if not argument.kwarg_only]
    assert names == [
        *("query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p"),
        *("is_causal", "return_debug_mask"),
    ]


def test_each_utterance_ends_and_then_its_padding_of_which_there_are_no_queries():
    queries, keys = module._ends(LENS, 7, 5)
    assert queries.tolist() == [0, 5, 5, 10, 10, 15, 15, 20, 20]
    assert keys.tolist() == [0, 7, 7, 11, 14, 14, 21, 22, 28]
    assert queries.dtype == keys.dtype == torch.int32


def test_a_cpu_has_no_such_kernel():
    assert sequence_ends(LENS, 7, 7) is None


@pytest.mark.parametrize(
    ("dtype", "d", "d_v", "expected"),
    [
        (torch.bfloat16, 64, 64, True),
        (torch.float16, 48, 48, True),
        (torch.float32, 64, 64, False),
        (torch.bfloat16, 64, 32, False),
        (torch.bfloat16, 20, 20, False),
        (torch.bfloat16, 200, 200, False),
    ],
)
def test_heads_that_the_kernel_knows(dtype, d, d_v, expected):
    Q, V = torch.zeros(1, 1, 1, d, dtype=dtype), torch.zeros(1, 1, 1, d_v, dtype=dtype)
    assert fits(Q, V) == expected


def check(Q, K, V, lens, **tolerance):
    """Values and gradients are those of attention under the length mask."""
    dropout, upstream = Dropout(0.1).eval(), torch.randn_like(Q)
    found = []
    ends, mask = module._ends(lens, K.shape[2], Q.shape[2]), length_mask(lens, K.shape[2])
    for way in (
        lambda *inputs: flash_attention(*inputs, ends, dropout),
        lambda *inputs: scaled_dot_product_attention(*inputs, mask, dropout),
    ):
        inputs = [x.detach().clone().requires_grad_() for x in (Q, K, V)]
        out = way(*inputs)
        found.append((out, *torch.autograd.grad((out * upstream).sum(), inputs)))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, **tolerance)
    for gradient in found[0][2:]:
        assert not gradient.transpose(1, 2).flatten(2).masked_select(mask[:, 0, 0, :, None]).any()


@pytest.mark.parametrize("queries", [7, 5])
def test_it_is_attention_under_the_length_mask(queries, calls):
    check(torch.randn(4, 2, queries, 8), torch.randn(4, 2, 7, 8), torch.randn(4, 2, 7, 8), LENS)
    assert len(calls) == 1


@on_gpu
@pytest.mark.parametrize("queries", [200, 70])
def test_so_is_the_kernel(queries):
    shapes = (4, 2, queries, 64), (4, 2, 200, 64), (4, 2, 200, 64)
    inputs = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    check(*inputs, torch.tensor([200, 131, 0, 1], device="cuda"), atol=3e-2, rtol=3e-2)


@on_gpu
def test_the_kernel_drops_as_many_weights_as_it_is_told():
    B, L = 64, 256
    Q, V = (x(B, 8, L, 64, device="cuda", dtype=torch.bfloat16) for x in (torch.zeros, torch.ones))
    ends = sequence_ends(torch.full((B,), L, device="cuda"), L, L)
    out = flash_attention(Q, Q, V, ends, Dropout(0.2).train())[..., 0].float()
    assert out.mean().item() == pytest.approx(1, abs=1e-2)
    spread = out.var().item() * L  # p / (1 - p)
    assert spread / (1 + spread) == pytest.approx(0.2, abs=1e-2)


def batch_of(config: ModelConfig, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    X, Y = torch.randn(2, 80, config.input_dim), torch.randint(4, config.vocab_size, (2, 5))
    return tuple(x.to(device) for x in (X, torch.tensor([80, 50]), Y, torch.tensor([5, 3])))


@pytest.mark.parametrize("encoder", ["transformer", "conformer"])
def test_encoder_and_decoder_take_it_and_give_the_same(tiny_config, encoder, calls, monkeypatch):
    model, batch = Transformer(replace(tiny_config, encoder=encoder)).eval(), batch_of(tiny_config)
    fast = model(*batch)
    assert len(calls) == tiny_config.encoder_layers + tiny_config.decoder_layers
    monkeypatch.setattr("asr.model.attention.fits", lambda Q, V: False)
    slow = model(*batch)
    assert len(calls) == tiny_config.encoder_layers + tiny_config.decoder_layers
    torch.testing.assert_close(fast.log_probs, slow.log_probs)
    torch.testing.assert_close(fast.memory[1, : fast.memory_lens[1]], slow.memory[1, : slow.memory_lens[1]])


def test_a_window_is_kept_to_and_weights_that_are_asked_for_are_computed(tiny_config, calls):
    X, X_lens, Y, _ = batch_of(tiny_config)
    windowed = Transformer(replace(tiny_config, attention_left=2, attention_right=2))
    memory, memory_lens = windowed.encoder(X, X_lens)
    weights: list[torch.Tensor] = []
    windowed.decoder(Y, memory, memory_lens, weights)
    assert not calls and len(weights) == tiny_config.decoder_layers


@on_gpu
@pytest.mark.parametrize("encoder", ["transformer", "conformer"])
def test_a_training_step_on_a_gpu_takes_the_kernel_and_has_the_same_gradients(tiny_config, encoder, monkeypatch):
    model = Transformer(replace(tiny_config, encoder=encoder, dropout=0.0)).cuda().train()
    batch, called = batch_of(tiny_config, "cuda"), []
    kernel = torch.ops.aten._flash_attention_forward
    monkeypatch.setattr(
        torch.ops.aten, "_flash_attention_forward", lambda *args: (called.append(1), kernel(*args))[1], raising=False
    )
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        with torch.autocast("cuda", dtype, enabled=dtype == torch.bfloat16):
            output = model(*batch)
        output.log_probs[:, :, 4].sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        model.zero_grad()
    assert len(called) == tiny_config.encoder_layers + tiny_config.decoder_layers  # none of them in float32
    assert (gradients[0] - gradients[1]).norm() < 0.05 * gradients[1].norm()
