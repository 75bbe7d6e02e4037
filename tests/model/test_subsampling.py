import pytest
import torch

from asr.model.config import ModelConfig
from asr.model.subsampling import ConvSubsampling


def subsampler(factor: int) -> ConvSubsampling:
    return ConvSubsampling(ModelConfig(d_model=16, num_heads=2, subsampling=factor, subsampling_channels=4)).eval()


@pytest.mark.parametrize("factor", [2, 4, 6, 8])
def test_length_falls_by_the_factor(factor):
    x, lens = subsampler(factor)(torch.randn(2, 1000, 80), torch.tensor([1000, 500]))
    assert lens[0] == x.shape[1]
    assert lens.tolist() == pytest.approx([1000 / factor, 500 / factor], abs=3)


@pytest.mark.parametrize("factor", [2, 4, 6, 8])
def test_padding_never_reaches_a_real_frame(factor):
    module = subsampler(factor)
    X = torch.randn(1, 97, 80)
    alone, lens = module(X, torch.tensor([97]))
    padded, padded_lens = module(torch.nn.functional.pad(X, (0, 0, 0, 60), value=9.0), torch.tensor([97]))
    assert lens == padded_lens
    torch.testing.assert_close(alone, padded[:, : lens[0]], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("factor", [2, 4, 6, 8])
@pytest.mark.parametrize("frames", [0, 1, 5])
def test_an_utterance_too_short_has_length_zero(factor, frames):
    x, lens = subsampler(factor)(torch.randn(1, frames, 80), torch.tensor([frames]))
    assert x.shape[1] >= 1
    assert lens.item() == 0


def test_too_narrow_an_input_is_refused():
    with pytest.raises(ValueError, match="model.input_dim=8"):
        ConvSubsampling(ModelConfig(input_dim=8, subsampling=8))
