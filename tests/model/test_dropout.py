import pytest
import torch

from asr.model.config import ModelConfig
from asr.model.dropout import Dropout, cpu_dropout_mask, hashed_mask
from asr.model.transformer import Transformer

SHARES = {torch.float64: 26 / 256, torch.float32: 26 / 256, torch.float16: 26 / 256, torch.bfloat16: 25 / 256}


@pytest.mark.parametrize(("dtype", "share"), SHARES.items())
def test_the_mask_keeps_the_expectation(dtype, share):
    mask = cpu_dropout_mask(torch.Size([1000, 1001]), 0.1, dtype).float()
    dropped = (mask == 0).float().mean().item()
    assert dropped == pytest.approx(share, abs=2e-3)
    assert mask.mean().item() == pytest.approx(1.0, abs=2e-3)
    assert len(mask.unique()) == 2


def test_the_seed_fixes_the_mask_and_every_call_has_another():
    masks = []
    for _ in range(2):
        torch.manual_seed(7)
        masks.append([cpu_dropout_mask(torch.Size([50]), 0.5, torch.float32) for _ in range(2)])
    assert torch.equal(masks[0][0], masks[1][0])
    assert torch.equal(masks[0][1], masks[1][1])
    assert not torch.equal(masks[0][0], masks[0][1])


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
def test_of_relu_is_dropout_of_relu_and_keeps_its_result_alone(dtype):
    x, gradient = torch.randn(8, 50, dtype=dtype), torch.randn(8, 50, dtype=dtype)
    found, kept = [], []
    for way in (lambda dropout, x: dropout(x.relu()), Dropout.of_relu):
        torch.manual_seed(5)
        of = x.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            y = way(Dropout(0.4), of)
        y.backward(gradient)
        found.append((y.detach(), of.grad))
    assert len(kept) == 3 and torch.equal(kept[-1], found[1][0])  # the first way stores two tensors, the other one
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert torch.equal(Dropout(0.4).eval().of_relu(x), x.relu())


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
