import pytest
import torch

from asr.model.config import ModelConfig
from asr.model.deepening import deepen
from asr.model.language_model import LanguageModel
from asr.model.transformer import Transformer

SMALL = {"vocab_size": 12, "input_dim": 20, "d_model": 16, "ffn_dim": 32, "num_heads": 2, "decoder_layers": 1}


@pytest.fixture
def inputs():
    X, Y = torch.randn(2, 60, 20), torch.randint(4, 12, (2, 5))
    return X, torch.tensor([60, 41]), Y, torch.tensor([5, 3])


def trained(**options) -> Transformer:
    """A model with no weight at its initial value: norms have scales, biases are not zero."""
    model = Transformer(ModelConfig(**SMALL, **options)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("more", [1, 2, 3])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("encoder", ["conformer", "transformer"])
def test_a_deeper_encoder_computes_what_it_did(inputs, encoder, norm_first, more):
    model = trained(encoder=encoder, norm_first=norm_first, encoder_layers=3, conv_kernel=3)
    before = model(*inputs)
    deepen(model, more)
    after = model(*inputs)
    assert len(model.encoder.layers) == model.config.encoder_layers == model.encoder.config.encoder_layers == 3 + more
    torch.testing.assert_close(after.memory, before.memory, atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(after.log_probs, before.log_probs, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("norm_first", [True, False])
def test_a_deeper_language_model_computes_what_it_did(norm_first):
    model = LanguageModel(ModelConfig(**SMALL | {"decoder_layers": 2}, norm_first=norm_first)).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    Y = torch.randint(4, 12, (2, 7))
    before = model(Y)
    deepen(model, 1)
    assert len(model.layers) == model.config.decoder_layers == 3
    torch.testing.assert_close(model(Y), before, atol=2e-4, rtol=1e-3)


def test_ctc_from_layers_between_goes_on_from_the_same_ones(inputs):
    model = trained(encoder="conformer", encoder_layers=4, conv_kernel=3)
    before = model(*inputs, intermediate=1).every_ctc[1]
    deepen(model, 2)
    torch.testing.assert_close(model(*inputs, intermediate=1).every_ctc[1], before, atol=2e-4, rtol=1e-3)


def test_every_layer_that_was_added_learns(inputs):
    model = trained(encoder="conformer", encoder_layers=2, conv_kernel=3)
    deepen(model, 2)
    for steps in range(2):  # the first moves only what adds to the residual stream
        model(*inputs).log_probs.sum().backward()
        for name, parameter in model.encoder.layers.named_parameters():
            if steps and "key.bias" not in name:  # a key bias shifts all scores of a query alike
                assert parameter.grad.abs().max() > 0, name
        torch.optim.SGD(model.parameters(), lr=0.01).step()


def test_no_more_layers_are_added_than_there_are():
    with pytest.raises(ValueError, match="there are 2 layers"):
        deepen(trained(encoder_layers=2), 3)
