import copy
import pickle

import pytest
import torch
from torch import nn

from asr.decode.packing import PackedConv2d, PackedLinear, can_pack, pack
from asr.decode.recognizer import Recognizer
from asr.model.config import ModelConfig
from asr.model.transformer import Transformer

pytestmark = pytest.mark.skipif(not can_pack(torch.device("cpu")), reason="oneDNN has no bfloat16 on this CPU")


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.SiLU, nn.Identity])
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_a_packed_layer_computes_what_the_layer_and_its_activation_did(activation, bias):
    plain = nn.Sequential(nn.Linear(48, 80, bias=bias), activation(), nn.Linear(80, 16)).bfloat16()
    packed = pack(copy.deepcopy(plain))
    assert [type(layer) for layer in packed] == [PackedLinear, nn.Identity, PackedLinear]
    for shape in ((3, 48), (2, 5, 48), (1, 1, 48)):
        x = torch.randn(shape).bfloat16()
        torch.testing.assert_close(packed(x), plain(x), atol=0.03, rtol=0.02)


@torch.inference_mode()
def test_a_convolution_is_packed_with_its_activation():
    plain = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 5, 3)).bfloat16()
    packed = pack(copy.deepcopy(plain))
    assert [type(layer) for layer in packed] == [PackedConv2d, nn.Identity, nn.Conv2d]
    x = torch.randn(2, 1, 50, 40).bfloat16()
    torch.testing.assert_close(packed(x), plain(x), atol=0.03, rtol=0.02)


@pytest.mark.parametrize("encoder", ["transformer", "conformer"])
@torch.inference_mode()
def test_a_whole_model_has_no_layer_left_to_lay_out(encoder):
    config = ModelConfig(encoder=encoder, d_model=32, ffn_dim=64, encoder_layers=1, decoder_layers=1, key_bias=False)
    plain = Transformer(config).eval().bfloat16()
    packed = pack(copy.deepcopy(plain))
    assert not any(type(layer) in (nn.Linear, nn.Conv2d) for layer in packed.modules())
    assert packed.decoder.embedding.weight.shape == (32, 32)
    inputs = torch.randn(2, 60, 80), torch.tensor([60, 40])
    memory, lens = plain.encoder(*inputs)
    torch.testing.assert_close(packed.encoder(*inputs)[0], memory, atol=0.1, rtol=0.05)
    tokens = torch.tensor([[4, 5, 6], [7, 8, 9]])
    log_probs = plain.decoder(tokens, memory, lens)
    torch.testing.assert_close(packed.decoder(tokens, memory, lens), log_probs, atol=0.1, rtol=0.05)
    state, step = packed.decoder.start(memory, lens, 1), None
    for token in tokens.T:
        step, state = packed.decoder.step(token[:, None], state)
    torch.testing.assert_close(step[:, 0], log_probs[:, -1], atol=0.1, rtol=0.05)


def test_a_packed_model_is_neither_saved_nor_copied_nor_taken_for_another_precision(tiny_model, tmp_path):
    recognizer = Recognizer(tiny_model, precision="bfloat16")
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(ValueError, match="packed"):
            copied(recognizer)
    with pytest.raises(ValueError, match="packed"):
        tiny_model.save(tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="changed to bfloat16 before"):
        Recognizer(tiny_model, precision="float32")
