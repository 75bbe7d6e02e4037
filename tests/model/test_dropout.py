import pytest
import torch

from asr.model.config import ModelConfig
from asr.model.dropout import Dropout, cpu_dropout_mask
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


def test_dropout_is_off_in_evaluation():
    x = torch.ones(100)
    assert torch.equal(Dropout(0.5).eval()(x), x)
    assert not torch.equal(Dropout(0.5)(x), x)


def test_the_four_places_of_dropout_are_counted():
    """Attention weights, inside the FFN, each sub-layer's output, embeddings plus positions."""
    config = ModelConfig(d_model=16, num_heads=2, encoder_layers=3, decoder_layers=2, ffn_dim=32)
    places = sum(isinstance(module, Dropout) for module in Transformer(config).modules())
    encoder = 1 + 3 * (1 + 1 + 2)
    decoder = 1 + 2 * (2 + 1 + 3)
    assert places == encoder + decoder
