import pytest
import torch

from asr.model.config import ModelConfig
from asr.model.dropout import Dropout, draw_kept, hashed_mask, keep
from asr.model.transformer import Transformer

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", TYPES)
def test_dropout_keeps_the_expectation(dtype):
    x = torch.rand(1000, 1001).to(dtype)
    y = Dropout(0.1)(x)
    kept = y != 0
    assert 1 - kept.float().mean().item() == pytest.approx(26 / 256, abs=2e-3)
    assert (y.double().sum() / x.double().sum()).item() == pytest.approx(1.0, abs=2e-3)
    torch.testing.assert_close(y, (x.float() * 256 / 230).to(dtype).where(kept, 0.0))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("threads", [1, 2])
def test_what_is_not_kept_is_zero_and_the_rest_as_it_was(dtype, threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    x = torch.randn(3, 40, 4, 5).to(dtype).transpose(1, 2)
    kept, scale = draw_kept(x.shape, 0.5)
    assert scale == 2 and 0.4 < kept.float().mean().item() < 0.6
    expected = x.where(kept, 0.0)
    assert torch.equal(keep(x, kept), expected)
    assert keep(x, kept, out=x) is x and torch.equal(x, expected)


def test_something_is_kept_however_much_is_dropped():
    kept, scale = draw_kept(torch.Size([100_000]), 0.9999)
    assert scale == 256 and kept.float().mean().item() == pytest.approx(1 / 256, rel=0.2)


def test_the_seed_fixes_what_is_kept_and_every_call_has_another():
    drawn = []
    for _ in range(2):
        torch.manual_seed(7)
        drawn.append([draw_kept(torch.Size([50]), 0.5)[0] for _ in range(2)])
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])
    assert not torch.equal(drawn[0][0], drawn[0][1])


def test_a_hashed_mask_leaves_out_its_share_and_no_place_tells_of_another():
    torch.manual_seed(3)
    p, shape, cpu = 0.1, torch.Size([1000, 1000]), torch.device("cpu")
    dropped = [(~hashed_mask(shape, p, cpu)).float() for _ in range(2)]
    deviation = (p * (1 - p) / 1e6) ** 0.5
    assert [x.mean().item() for x in dropped] == pytest.approx([p, p], abs=4 * deviation)
    together = [dropped[0] * dropped[1], dropped[0][1:] * dropped[0][:-1], dropped[0].mT[1:] * dropped[0].mT[:-1]]
    assert [x.mean().item() for x in together] == pytest.approx(3 * [p * p], abs=4e-4)
    torch.manual_seed(3)
    assert torch.equal((~hashed_mask(shape, p, cpu)).float(), dropped[0])


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_the_gradient_is_of_what_was_kept_and_no_mask_is_stored(relu, dtype):
    dropout, sizes = Dropout(0.3), []
    compiled = torch.compile(dropout.of_relu if relu else dropout, backend="aot_eager_decomp_partition", dynamic=True)
    for length in (40, 60):
        x = torch.randn(length, 50).to(dtype).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            y = compiled(x)
        y.sum().backward()
        kept = y != 0
        assert 0.5 < kept.float().mean().item() / (0.35 if relu else 0.7) < 1.5
        scaled = x.detach() * (1 / 0.7)
        torch.testing.assert_close(y.detach(), scaled.where(kept, 0.0))
        torch.testing.assert_close(x.grad, torch.full_like(x, 1 / 0.7).where(kept, 0.0))
    assert len([size for size in sizes if size >= 2000]) == (2 if relu else 0)  # which tell where relu was zero


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_of_what_was_kept_and_a_byte_for_each_element_is_stored(dtype):
    x, gradient, stored = torch.randn(8, 50).to(dtype).requires_grad_(), torch.randn(8, 50).to(dtype), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: stored.append(t) or t, lambda t: t):
        y = Dropout(0.5)(x)
    y.backward(gradient)
    assert [t.dtype for t in stored] == [torch.bool]
    assert torch.equal(y.detach(), 2 * x.detach().where(stored[0], 0.0))
    assert torch.equal(x.grad, 2 * gradient.where(stored[0], 0.0))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_relu_is_dropout_of_relu(dtype, device):
    x, gradient = (torch.randn(8, 50, dtype=dtype, device=device) for _ in range(2))
    found = []
    for way in (lambda dropout, x: dropout(x.relu()), Dropout.of_relu):
        torch.manual_seed(5)
        of = x.clone().requires_grad_()
        y = way(Dropout(0.5), of)
        y.backward(gradient)
        found.append((y.detach(), of.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(Dropout(0.4).eval().of_relu(x), x.relu())


@needs_gpu
def test_of_relu_keeps_its_result_alone_on_a_gpu():
    x, stored = torch.randn(8, 50, device="cuda", requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: stored.append(t) or t, lambda t: t):
        y = Dropout(0.4).of_relu(x)
    assert len(stored) == 1 and torch.equal(stored[0], y)


def test_dropout_is_off_in_evaluation():
    x = torch.ones(100)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert not torch.equal(Dropout(0.5)(x), x)


def test_the_four_places_of_dropout_are_counted():
    """On attention weights, inside the FFN, on each sub-layer's output, and on embeddings plus positions."""
    config = ModelConfig(d_model=16, num_heads=2, encoder_layers=3, decoder_layers=2, ffn_dim=32)
    places = sum(isinstance(module, Dropout) for module in Transformer(config).modules())
    encoder = 1 + 3 * (1 + 1 + 2)
    decoder = 1 + 2 * (2 + 1 + 3)
    assert places == encoder + decoder
