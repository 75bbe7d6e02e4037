"""The kernels run on a GPU; Triton's interpreter computes the same on any machine."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from asr.model import flash_attention as module
from asr.model.attention import MultiHeadAttention
from asr.model.config import ModelConfig
from asr.model.flash_attention import fits, flash_attention, lens_for_kernels
from asr.model.language_model import LanguageModel
from asr.model.layers import layers_of
from asr.model.masks import causal_mask, length_mask
from asr.model.transformer import Transformer

HEADS = 2
on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < module.OLDEST,
    reason="the kernels are a GPU's, from Ampere on",
)


def version_of(package) -> tuple[int, ...]:
    return tuple(map(int, package.__version__.split(".")[:2]))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=on_gpu)])
def device(request) -> str:
    """A device that has the kernels: on a CPU, the interpreter runs them in float32."""
    if request.param == "cpu":
        triton = pytest.importorskip("triton", reason="Triton comes with torch for GPUs")
        if version_of(triton) < (3, 9) and version_of(np) >= (2, 4):
            pytest.skip("the interpreter of this Triton does not know this NumPy")
        if "TRITON_INTERPRET" not in os.environ:
            pytest.skip("where there is a GPU, Triton compiles")
    return request.param


def attention(q, k, v, lens, kept, p):
    """softmax(Q Kᵀ / √d) V of tensors `(B, L, H, d)`, with the `kept` weights scaled and the others dropped."""
    mask = causal_mask(k.shape[1], q.device) if lens is None else length_mask(lens, k.shape[1])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[3] ** 0.5
    weights = scores.masked_fill(mask, float("-inf")).softmax(dim=3).masked_fill(mask, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", torch.where(kept, weights / (1 - p), 0.0), v)


def kept(of_queries, of_keys, p, shape):
    """True = kept: the product of the query's odd number and the key's number, modulo 2³², is at least p · 2³²."""
    queries, keys = (x.long() % 2**32 for x in (of_queries, of_keys))
    low, high = keys % 2**16, keys >> 16  # so that no product exceeds an int64
    product = (queries | 1)[:, None] * low + (((queries | 1)[:, None] * high % 2**16) << 16)
    return (product % 2**32 >= int(p * 2**32)).view(shape)


@pytest.mark.parametrize("p", [0.0, 0.3, 0.7])
@pytest.mark.parametrize(
    ("together", "L_q", "L_k", "d", "lens"),
    [
        ((3,), 70, 70, 16, [70, 32, 0]),  # self-attention
        ((1, 2), 37, 45, 24, [45, 33, 1]),  # attention to a memory
        ((1, 1, 1), 40, 40, 64, [60, 17, 9]),  # rotary; a length beyond L_k counts as L_k
        ((1, 1, 1), 1, 1, 16, None),
        ((3,), 70, 70, 16, None),  # causal
    ],
)
@pytest.mark.parametrize("strided", [False, True])
def test_values_and_gradients_are_those_of_attention_under_the_mask(device, together, L_q, L_k, d, lens, p, strided):
    B, dtype = 3, torch.float32 if device == "cpu" else torch.bfloat16
    lengths = [L_q if i == 0 else L_k for i in range(len(together))]
    given = []
    for L, n in zip(lengths, together, strict=True):
        x = torch.randn((B, n * HEADS, L, d) if strided else (B, L, n * HEADS, d), device=device, dtype=dtype)
        given.append((x.transpose(1, 2) if strided else x).requires_grad_())
    lens = None if lens is None else torch.tensor([lens, lens], device=device).T[:, 0]
    upstream = torch.randn(B, L_q, HEADS, d, device=device, dtype=dtype)
    out, _, *drawn = module._operator(*given, *[None] * (3 - len(given)), HEADS, lens, p)
    ours = out, *torch.autograd.grad(out, given, upstream)

    exact = [x.detach().float().requires_grad_() for x in given]
    which = kept(*drawn, p, (B, HEADS, L_q, L_k)) if p else torch.ones((), dtype=torch.bool, device=device)
    expected = attention(*module._parts(exact, HEADS), lens, which, p)
    expected = expected, *torch.autograd.grad(expected, exact, upstream.float())
    tolerance = 1e-5 if device == "cpu" else 1e-2
    for x, y in zip(ours, expected, strict=True):  # a single key has the weight 1 and the gradient 0
        assert (x.float() - y).norm() < tolerance * max(y.norm(), upstream.float().norm())
    if lens is not None:
        gradients = module._parts(list(ours[1:]), HEADS)[1:]
        assert not any(x[length_mask(lens, L_k)[:, 0, 0]].any() for x in gradients)


def test_it_is_an_operator_that_layers_are_compiled_around(device):
    q = torch.randn(2, 20, HEADS, 16, device=device, requires_grad=True)
    k = torch.randn(2, 30, 2 * HEADS, 16, device=device, requires_grad=True)
    if device == "cuda":
        q, k = (x.detach().bfloat16().requires_grad_() for x in (q, k))
    checks = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"
    lens = torch.tensor([30, 20], device=device)
    torch.library.opcheck(module._operator, (q, k, None, HEADS, lens, 0.0), test_utils=checks)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_weights_are_dropped_independently_with_the_probability(p):
    torch.manual_seed(0)
    rows, columns = 600, 500
    drawn = (torch.randint(-(2**31), 2**31, (n,), dtype=torch.int32) for n in (rows, columns))
    dropped = (~kept(*drawn, p, (rows, columns))).double() - p
    spread = p * (1 - p)
    assert abs(dropped.mean()) < 4 * (spread / dropped.numel()) ** 0.5
    for of_pairs in (dropped @ dropped.T / columns**0.5, dropped.T @ dropped / rows**0.5):
        pairs = of_pairs[tuple(torch.triu_indices(*of_pairs.shape, 1))] / spread
        assert pairs.std() == pytest.approx(1, abs=0.02) and pairs.abs().max() < 8


def test_none_is_dropped_without_a_draw(device):
    q = torch.randn(1, 8, 3 * HEADS, 16, device=device, dtype=torch.float32 if device == "cpu" else torch.bfloat16)
    state = torch.random.get_rng_state if device == "cpu" else torch.cuda.get_rng_state
    before = state()
    first, second = (flash_attention(q, None, None, HEADS, None) for _ in range(2))
    assert torch.equal(first, second) and torch.equal(before, state())
    assert not torch.equal(first, flash_attention(q, None, None, HEADS, None, p=0.5))


def test_a_cpu_has_no_such_kernels():
    assert lens_for_kernels(torch.tensor([3])) is None


def test_nor_has_a_gpu_on_which_they_cannot_be_compiled(monkeypatch, caplog):
    def without_compiler(*args):
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(module, "_operator", without_compiler)
    assert not module._runs_kernels.__wrapped__(torch.device("cpu"))
    assert "twice the time" in caplog.text and "C compiler" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "d", "d_v", "expected"),
    [
        (torch.bfloat16, 64, 64, True),
        (torch.float16, 48, 48, True),
        (torch.float32, 64, 64, False),
        (torch.bfloat16, 64, 32, False),
        (torch.bfloat16, 20, 20, False),
        (torch.bfloat16, 136, 136, False),
    ],
)
def test_heads_that_the_kernels_know(dtype, d, d_v, expected):
    assert fits(torch.zeros(1, dtype=dtype), d, d_v) == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert fits(torch.zeros(1), d, d_v) == (expected or dtype == torch.float32)


def batch_of(config: ModelConfig, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    X, Y = torch.randn(2, 80, config.input_dim), torch.randint(4, config.vocab_size, (2, 5))
    return tuple(x.to(device) for x in (X, torch.tensor([80, 50]), Y, torch.tensor([5, 3])))


@pytest.fixture
def calls(monkeypatch) -> list[tuple]:
    """Pretends that every device has kernels for all heads. Returns how many of Q, K, V each tensor of a call holds."""
    for name in ("encoder", "decoder", "language_model"):
        monkeypatch.setattr(f"asr.model.{name}.lens_for_kernels", lambda lens: lens)
    monkeypatch.setattr("asr.model.attention.fits", lambda *heads: True)
    found = []

    def kernels(q, k, v, num_heads, lens, p):
        found.append(tuple(x.shape[2] // num_heads for x in (q, k, v) if x is not None))
        parts = module._parts([x for x in (q, k, v) if x is not None], num_heads)
        return attention(*parts, lens, torch.ones((), dtype=torch.bool), 0.0)

    monkeypatch.setattr("asr.model.attention.flash_attention", kernels)
    return found


@pytest.mark.parametrize(
    ("options", "of_encoder"),
    [
        ({}, (3,)),
        ({"encoder": "conformer"}, (3,)),
        ({"positions": "rotary"}, (1, 1, 1)),
        ({"key_bias": False}, (3,)),
        ({"attention_bias": False}, (3,)),
    ],
)
def test_encoder_and_decoder_take_them_and_give_the_same(tiny_config, options, of_encoder, calls, monkeypatch):
    config = replace(tiny_config, **options)
    model, batch = Transformer(config).eval(), batch_of(config)
    fast = model(*batch)
    of_decoder = [(1, 1, 1) if config.positions_of_decoder == "rotary" else (3,), (1, 2)]
    assert calls == [of_encoder] * config.encoder_layers + of_decoder * config.decoder_layers
    monkeypatch.setattr("asr.model.attention.fits", lambda *heads: False)
    slow = model(*batch)
    torch.testing.assert_close(fast.log_probs, slow.log_probs)
    torch.testing.assert_close(fast.memory[1, : fast.memory_lens[1]], slow.memory[1, : slow.memory_lens[1]])


def test_products_are_apart_where_weights_are_sharded(tiny_config, calls):
    model, batch = Transformer(tiny_config).eval(), batch_of(tiny_config)
    together = model(*batch)
    for attention in model.modules():
        if isinstance(attention, MultiHeadAttention):
            attention.fuse_projections = False
    calls.clear()
    torch.testing.assert_close(model(*batch).log_probs, together.log_probs)
    assert set(calls) == {(1, 1, 1)}


def test_so_does_a_language_model(tiny_config, calls, monkeypatch):
    model, Y = LanguageModel(tiny_config).eval(), torch.randint(4, tiny_config.vocab_size, (2, 7))
    fast = model(Y)
    assert calls == [(3,)] * tiny_config.decoder_layers
    monkeypatch.setattr("asr.model.attention.fits", lambda *heads: False)
    torch.testing.assert_close(fast, model(Y))


def test_a_window_is_kept_to_and_weights_that_are_asked_for_are_computed(tiny_config, calls):
    X, X_lens, Y, _ = batch_of(tiny_config)
    windowed = Transformer(replace(tiny_config, attention_left=2, attention_right=2))
    memory, memory_lens = windowed.encoder(X, X_lens)
    assert not calls
    weights: list[torch.Tensor] = []
    windowed.decoder(Y, memory, memory_lens, weights)
    assert calls == [(3,)] * tiny_config.decoder_layers and len(weights) == tiny_config.decoder_layers


@on_gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("options", [{}, {"encoder": "conformer", "positions": "rotary"}])
def test_a_training_step_on_a_gpu_takes_them_and_has_the_same_gradients(tiny_config, options, compiled, monkeypatch):
    model = Transformer(replace(tiny_config, dropout=0.0, **options)).cuda().train()
    if compiled:
        for layer in layers_of(model):
            layer.compile(dynamic=True)
    batch, called, launch = batch_of(tiny_config, "cuda"), [], module._launch
    monkeypatch.setattr(module, "_launch", lambda kernel, *args: (called.append(kernel), launch(kernel, *args)))
    gradients = []
    for dtype in (torch.bfloat16, torch.float32):
        with torch.autocast("cuda", dtype, enabled=dtype == torch.bfloat16):
            output = model(*batch)
        output.log_probs[:, :, 4].sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        model.zero_grad()
    layers = tiny_config.encoder_layers + 2 * tiny_config.decoder_layers
    assert len(called) == 3 * layers  # none of them in float32
    assert (gradients[0] - gradients[1]).norm() < 0.05 * gradients[1].norm()
