import copy

import pytest
import torch
from torch import nn

from asr.decode.packing import pack
from asr.decode.quantization import (
    STEPS,
    ZERO,
    QuantizedLinear,
    QuantizedNorm,
    can_quantize,
    quantize,
)
from asr.model.config import ModelConfig
from asr.model.layers import TransformerEncoderLayer
from asr.model.transformer import Transformer

in_hardware = pytest.mark.skipif(not can_quantize(torch.device("cpu")), reason="this CPU has no AVX512-VNNI")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_norm_gives_so_many_steps_a_deviation_and_cuts_off_what_is_far_out(dtype):
    norm = nn.LayerNorm(100)
    nn.init.normal_(norm.weight)  # the next layer applies the gain and the bias
    x = 3 + 5 * torch.randn(7, 100)
    x[0, 0], x[1, 1] = 1e4, -1e4  # nearly ten standard deviations
    x = x.to(dtype)
    whole = QuantizedNorm(norm, torch.full((100,), float(STEPS)))(x)
    assert whole.dtype == torch.uint8
    assert (whole[0, 0], whole[1, 1]) == (255, 0)
    normalized = nn.functional.layer_norm(x.float(), (100,))
    assert ((whole.float() - ZERO) / STEPS - normalized)[2:].abs().max() <= 0.5 / STEPS + 1e-4


@in_hardware
@torch.inference_mode()
def test_a_feature_far_out_that_weighs_little_is_kept():
    layer = TransformerEncoderLayer(ModelConfig(d_model=64, ffn_dim=256)).eval()
    norm = layer.ffn_residual.norm
    norm.weight[3], norm.bias[3] = 0.1, 1.0
    x = torch.randn(50, 1, 64)
    x[::2, :, 3] += 40  # nearly eight standard deviations in every second row
    exact = layer.ffn(norm(x))
    quantize(nn.ModuleList([layer]), torch.float32)
    assert (layer.ffn(layer.ffn_residual.norm(x)) - exact).norm() < 0.03 * exact.norm()


@in_hardware
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
@torch.inference_mode()
def test_a_layer_in_whole_numbers_computes_about_what_it_did(activation, dtype):
    config = ModelConfig(d_model=64, ffn_dim=256, activation=activation, key_bias=False)
    layer = TransformerEncoderLayer(config).eval()
    for norm in (layer.attention_residual.norm, layer.ffn_residual.norm):
        nn.init.uniform_(norm.weight, 0.2, 3)
        nn.init.normal_(norm.bias)
    nn.init.normal_(layer.ffn[0].bias)
    x = torch.randn(8, 50, 64).to(dtype)
    exact = layer(x.float(), None) - x
    quick = quantize(nn.ModuleList([copy.deepcopy(layer)]), dtype)[0]
    assert [type(each) for each in quick.ffn][::3] == [QuantizedLinear] * 2
    assert type(quick.attention.fused.linear) is QuantizedLinear
    error = quick(x, None).float() - x - exact
    assert error.norm() < 0.04 * exact.norm()


@in_hardware
@pytest.mark.parametrize("encoder", ["transformer", "conformer"])
@torch.inference_mode()
def test_every_layer_behind_a_norm_is_in_whole_numbers_and_a_step_agrees_with_the_whole(encoder):
    config = ModelConfig(encoder=encoder, d_model=32, ffn_dim=64, encoder_layers=1, decoder_layers=1)
    model = pack(quantize(Transformer(config).eval(), torch.bfloat16))
    behind = {"transformer": 1 + 2, "conformer": 2 + 1 + 1 + 2}[encoder] + (1 + 1 + 2)
    assert sum(isinstance(layer, QuantizedLinear) for layer in model.modules()) == behind
    memory, lens = model.encoder(torch.randn(2, 60, 80), torch.tensor([60, 40]))
    tokens = torch.tensor([[4, 5, 6], [7, 8, 9]])
    log_probs = model.decoder(tokens, memory, lens)
    state, step = model.decoder.start(memory, lens, 1), None
    for token in tokens.T:
        step, state = model.decoder.step(token[:, None], state)
    torch.testing.assert_close(step[:, 0], log_probs[:, -1], atol=0.1, rtol=0.05)


@in_hardware
@torch.inference_mode()
def test_norms_and_the_residual_stream_stay_in_float32():
    config = ModelConfig(encoder="conformer", d_model=32, ffn_dim=64, encoder_layers=1, decoder_layers=1)
    model = Transformer(config).eval()
    norm = nn.init.normal_(model.encoder.norm.weight).clone()
    pack(quantize(model, torch.bfloat16))
    assert torch.equal(model.encoder.norm.weight, norm)
    memory, _ = model.encoder(torch.randn(2, 60, 80), torch.tensor([60, 40]))
    assert memory.dtype == torch.float32
    assert model.decoder.start(memory, torch.tensor([14, 9]), 1).past.layers[0][0].dtype == torch.bfloat16


@torch.inference_mode()
def test_where_the_residual_stream_is_normed_itself_nothing_is_quantised():
    model = Transformer(ModelConfig(norm_first=False, d_model=32, ffn_dim=64, encoder_layers=1, decoder_layers=1))
    before = [type(module) for module in model.modules()]
    assert [type(module) for module in quantize(model, torch.float32).modules()] == before
