import pytest
import torch

from asr.model.config import ModelConfig
from asr.model.encoder import Encoder
from asr.model.subsampling import PART, Conv1dSubsampling, ConvSubsampling, LinearSubsampling, product_with_windows


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


@pytest.mark.parametrize("factor", [2, 4, 6, 8])
def test_the_first_convolution_is_a_product_with_windows(factor):
    first, X = subsampler(factor).convolutions[0], torch.randn(2, 101, 80)
    product = product_with_windows(X, first)
    torch.testing.assert_close(product, first(X.unsqueeze(1)), atol=1e-6, rtol=1e-5)
    assert product.is_contiguous(memory_format=torch.channels_last)


def test_too_narrow_an_input_is_refused():
    with pytest.raises(ValueError, match="model.input_dim=8"):
        ConvSubsampling(ModelConfig(input_dim=8, subsampling=8))


@pytest.mark.parametrize(("kind", "factor"), [("conv1d", 2), ("conv1d_glu", 4)])
def test_over_time_alone_every_frame_counts_from_the_first(kind, factor):
    config = ModelConfig(d_model=16, num_heads=2, subsampler=kind, subsampling=factor, subsampling_channels=12)
    x, lens = Conv1dSubsampling(config).eval()(torch.randn(3, 101, 80), torch.tensor([101, 100, 1]))
    assert x.shape == (3, lens[0], 16)
    assert lens.tolist() == [-(-101 // factor), -(-100 // factor), 1]


@pytest.mark.parametrize(("kind", "factor"), [("conv1d", 2), ("conv1d_glu", 4)])
@pytest.mark.parametrize("frames", [60, 61, 62, 63])
def test_over_time_alone_padding_never_reaches_a_real_frame_either(kind, factor, frames):
    config = ModelConfig(d_model=16, num_heads=2, subsampler=kind, subsampling=factor, subsampling_channels=12)
    module = Conv1dSubsampling(config).eval()
    X = torch.randn(1, frames, 80)
    alone, lens = module(X, torch.tensor([frames]))
    padded, padded_lens = module(torch.nn.functional.pad(X, (0, 0, 0, 40), value=9.0), torch.tensor([frames]))
    assert lens == padded_lens == alone.shape[1]
    torch.testing.assert_close(alone, padded[:, : lens[0]], atol=1e-6, rtol=1e-5)


def test_a_subsampler_by_another_factor_than_its_own_is_refused():
    with pytest.raises(ValueError, match="model.subsampling=4: model.subsampler=conv1d is by 2"):
        ModelConfig(subsampler="conv1d", subsampling=4)


@pytest.mark.parametrize("factor", [2, 4, 6, 8])
@pytest.mark.parametrize("beyond", [-1, 0, 1, 40])
def test_what_is_long_is_subsampled_in_parts_and_comes_out_the_same(factor, beyond):
    module = subsampler(factor)
    frames = PART * factor + module.reach - module.factor + beyond
    X, lens = torch.randn(1, frames, 80), torch.tensor([frames])
    whole, whole_lens = module(X, lens)
    with torch.no_grad():
        parts, parts_lens = module(X, lens)
    assert whole_lens == parts_lens == whole.shape[1]
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-5)


def test_a_linear_front_end_leaves_every_frame_by_itself():
    module = LinearSubsampling(ModelConfig(subsampler="linear", subsampling=1, input_dim=5, d_model=16))
    X, lens = torch.randn(2, 7, 5), torch.tensor([7, 3])
    x, x_lens = module(X, lens)
    assert x.shape == (2, 7, 16) and x_lens.tolist() == [7, 3]
    torch.testing.assert_close(module(X[:, 2:3], lens)[0], x[:, 2:3])
    assert module.output_lens(torch.tensor(7)) == 7


def test_token_ids_are_embedded_one_by_one():
    encoder = Encoder(ModelConfig(subsampler="embedding", subsampling=1, d_model=16, vocab_size=9, encoder_layers=1))
    x, lens = encoder.subsampling(torch.tensor([[4, 8, 4]]), torch.tensor([3]))
    assert x.shape == (1, 3, 16) and lens.tolist() == [3]
    assert torch.equal(x[0, 0], x[0, 2]) and not torch.equal(x[0, 0], x[0, 1])
    memory, lens = encoder(torch.tensor([[4, 8, 4]]), torch.tensor([3]))
    assert memory.shape == (1, 3, 16) and lens.tolist() == [3]


@pytest.mark.parametrize(("subsampler", "factor"), [("linear", 4), ("embedding", 2), ("conv2d", 1)])
def test_front_ends_have_their_own_factors(subsampler, factor):
    with pytest.raises(ValueError, match=f"model.subsampling={factor}: model.subsampler={subsampler} is by"):
        ModelConfig(subsampler=subsampler, subsampling=factor)
