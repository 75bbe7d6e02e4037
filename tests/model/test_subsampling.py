import pytest
import torch

from asr.model.config import ModelConfig
from asr.model.subsampling import Conv1dSubsampling, ConvSubsampling


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


@pytest.mark.parametrize(("kind", "factor"), [("conv1d", 2), ("conv1d_glu", 4)])
def test_over_time_alone_every_frame_counts_from_the_first(kind, factor):
    config = ModelConfig(d_model=16, num_heads=2, subsampler=kind, subsampling=factor, subsampling_channels=12)
    x, lens = Conv1dSubsampling(config).eval()(torch.randn(3, 101, 80), torch.tensor([101, 100, 1]))
    assert x.shape == (3, lens[0], 16)
    assert lens.tolist() == [-(-101 // factor), -(-100 // factor), 1]


def test_a_subsampler_by_another_factor_than_its_own_is_refused():
    with pytest.raises(ValueError, match="model.subsampler=conv1d does not subsample by 4"):
        ModelConfig(subsampler="conv1d", subsampling=4)
