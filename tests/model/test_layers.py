import pytest
import torch

from asr.model.attention import MultiHeadAttention
from asr.model.autocast import to_autocast_dtype
from asr.model.config import ModelConfig
from asr.model.encoder import Encoder
from asr.model.layers import (
    ConformerEncoderLayer,
    ConvolutionModule,
    Residual,
    TransformerDecoderLayer,
    TransformerEncoderLayer,
    layers_of,
)
from asr.model.masks import causal_mask, length_mask
from asr.model.transformer import Transformer

ACTIVATIONS = {"relu": torch.nn.functional.relu, "gelu": torch.nn.functional.gelu, "silu": torch.nn.functional.silu}


def config(**changes) -> ModelConfig:
    return ModelConfig(**{"d_model": 16, "num_heads": 4, "ffn_dim": 32, **changes})


def copy_attention(ours: MultiHeadAttention, theirs: torch.nn.MultiheadAttention) -> None:
    theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
    theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key.bias, ours.value.bias]))
    theirs.out_proj.load_state_dict(ours.output.state_dict())


@torch.no_grad()
def torch_encoder_layer(ours: TransformerEncoderLayer, settings: ModelConfig) -> torch.nn.TransformerEncoderLayer:
    theirs = torch.nn.TransformerEncoderLayer(
        settings.d_model,
        settings.num_heads,
        settings.ffn_dim,
        activation=settings.activation if settings.activation != "silu" else torch.nn.functional.silu,
        batch_first=True,
        norm_first=settings.norm_first,
    )
    copy_attention(ours.attention, theirs.self_attn)
    theirs.norm1.load_state_dict(ours.attention_residual.norm.state_dict())
    theirs.norm2.load_state_dict(ours.ffn_residual.norm.state_dict())
    theirs.linear1.load_state_dict(ours.ffn[0].state_dict())
    theirs.linear2.load_state_dict(ours.ffn[3].state_dict())
    return theirs.eval()


@torch.no_grad()
def torch_decoder_layer(ours: TransformerDecoderLayer, settings: ModelConfig) -> torch.nn.TransformerDecoderLayer:
    theirs = torch.nn.TransformerDecoderLayer(
        settings.d_model,
        settings.num_heads,
        settings.ffn_dim,
        activation=settings.activation,
        batch_first=True,
        norm_first=settings.norm_first,
    )
    copy_attention(ours.self_attention, theirs.self_attn)
    copy_attention(ours.cross_attention, theirs.multihead_attn)
    theirs.norm1.load_state_dict(ours.self_attention_residual.norm.state_dict())
    theirs.norm2.load_state_dict(ours.cross_attention_residual.norm.state_dict())
    theirs.norm3.load_state_dict(ours.ffn_residual.norm.state_dict())
    theirs.linear1.load_state_dict(ours.ffn[0].state_dict())
    theirs.linear2.load_state_dict(ours.ffn[3].state_dict())
    return theirs.eval()


def randomize(module: torch.nn.Module) -> None:
    """Moves norms and biases away from one and zero, so that a forgotten one is seen."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))


def test_residual_and_norm_in_both_orders():
    x, sublayer = torch.randn(2, 5, 16), torch.nn.Linear(16, 16)
    post, pre = Residual(config(norm_first=False)).eval(), Residual(config(norm_first=True)).eval()
    torch.testing.assert_close(post(x, sublayer), post.norm(x + sublayer(x)))
    torch.testing.assert_close(pre(x, sublayer), x + sublayer(pre.norm(x)))


@pytest.mark.parametrize("norm_first", [True, False])
def test_under_autocast_what_is_multiplied_is_rounded_once_and_a_sum_that_is_not_normalised_never(norm_first):
    config = ModelConfig(d_model=16, num_heads=2, ffn_dim=32, norm_first=norm_first, dropout=0.0)
    layer, read = TransformerDecoderLayer(config).eval(), []
    for linear in (m for m in layer.modules() if isinstance(m, torch.nn.Linear)):
        linear.register_forward_pre_hook(lambda _, args: read.append(args[0].dtype))
    x, memory = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, to_autocast_dtype(memory))
    assert len(read) == 10 and set(read) == {torch.bfloat16}
    with torch.autocast("cpu", torch.bfloat16):
        in_training = layer.train()(x, to_autocast_dtype(memory))
    assert set(read) == {torch.bfloat16}
    assert out.dtype == in_training.dtype == (torch.float32 if norm_first else torch.bfloat16)
    torch.testing.assert_close(in_training.float(), out.float(), atol=0.03, rtol=0.03)
    assert to_autocast_dtype(x) is x


def test_the_norm_is_of_biased_variance_with_eps_inside_the_root():
    norm = Residual(config()).norm
    x = torch.randn(3, 16)
    variance = x.var(dim=-1, unbiased=False, keepdim=True)
    torch.testing.assert_close(norm(x), (x - x.mean(dim=-1, keepdim=True)) / (variance + 1e-5).sqrt())


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_an_encoder_layer_equals_torchs(norm_first, activation):
    settings = config(norm_first=norm_first, activation=activation)
    ours = TransformerEncoderLayer(settings).eval()
    randomize(ours)
    x, lens = torch.randn(3, 7, 16), torch.tensor([7, 3, 5])
    mask = length_mask(lens, 7)
    expected = torch_encoder_layer(ours, settings)(x, src_key_padding_mask=mask[:, 0, 0])
    for row, n in enumerate(lens):
        torch.testing.assert_close(ours(x, mask)[row, :n], expected[row, :n], atol=1e-5, rtol=0)


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_decoder_layer_equals_torchs(norm_first):
    settings = config(norm_first=norm_first)
    ours = TransformerDecoderLayer(settings).eval()
    randomize(ours)
    x, memory, lens = torch.randn(3, 5, 16), torch.randn(3, 7, 16), torch.tensor([7, 3, 5])
    mask = length_mask(lens, 7)
    theirs = torch_decoder_layer(ours, settings)
    expected = theirs(x, memory, tgt_mask=causal_mask(5), memory_key_padding_mask=mask[:, 0, 0])
    torch.testing.assert_close(ours(x, memory, mask), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("norm_first", [False, True])
def test_whole_stacks_equal_torchs_final_norms_included(norm_first):
    front_end = {"subsampler": "linear", "subsampling": 1, "input_dim": 16}
    settings = config(norm_first=norm_first, encoder_layers=3, decoder_layers=2, **front_end)
    model = Transformer(settings).eval()
    randomize(model)
    lens, mask = torch.tensor([7, 3]), length_mask(torch.tensor([7, 3]), 7)
    encoder = torch.nn.TransformerEncoder(
        torch_encoder_layer(model.encoder.layers[0], settings), 3, enable_nested_tensor=False
    )
    encoder.layers = torch.nn.ModuleList(torch_encoder_layer(layer, settings) for layer in model.encoder.layers)
    decoder = torch.nn.TransformerDecoder(torch_decoder_layer(model.decoder.layers[0], settings), 2)
    decoder.layers = torch.nn.ModuleList(torch_decoder_layer(layer, settings) for layer in model.decoder.layers)
    if norm_first:
        encoder.norm, decoder.norm = model.encoder.norm, model.decoder.norm
    X = torch.randn(2, 7, 16)
    x = model.encoder.positions(model.encoder.subsampling(X, lens)[0])
    memory, ours = encoder(x, src_key_padding_mask=mask[:, 0, 0]), model.encoder(X, lens)[0]
    for row, n in enumerate(lens):
        torch.testing.assert_close(ours[row, :n], memory[row, :n], atol=1e-5, rtol=0)
    Y_in = torch.randint(4, 32, (2, 5))
    embedded = model.decoder.positions(model.decoder.embedding(Y_in))
    z = decoder(embedded, memory, tgt_mask=causal_mask(5), memory_key_padding_mask=mask[:, 0, 0])
    expected = model.decoder.output(z).log_softmax(dim=-1)
    torch.testing.assert_close(model.decoder(Y_in, memory, lens), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("encoder", "sublayers"), [("transformer", 2), ("conformer", 4)])
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_pre_norm_stack_starts_near_the_identity(encoder, sublayers, norm_first):
    """What a sub-layer adds is divided by the root of their number, and nothing that it adds is constant."""
    layers = Encoder(config(encoder=encoder, encoder_layers=3, norm_first=norm_first)).layers
    shrunk = (3 * sublayers) ** 0.5 if norm_first else 1
    for layer in layers:
        bounds = {layer.ffn[0]: 1 / 16**0.5, layer.ffn[3]: 1 / 32**0.5 / shrunk}
        bounds |= {layer.attention.query: (6 / 32) ** 0.5, layer.attention.output: (6 / 32) ** 0.5 / shrunk}
        if encoder == "conformer":
            bounds |= {layer.first_ffn[3]: 1 / 32**0.5 / shrunk, layer.convolution.output: 1 / 16**0.5 / shrunk}
        for linear, bound in bounds.items():
            assert linear.weight.abs().max().item() == pytest.approx(bound, rel=0.05)
        biases = [m.bias for m in layer.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv1d)]
        assert any(bias.any() for bias in biases) != norm_first


def test_base_has_the_parameters_of_torchs_transformer():
    settings = ModelConfig.preset("base")
    model = Transformer(settings)
    ours = sum(p.numel() for layers in (model.encoder.layers, model.decoder.layers) for p in layers.parameters())
    theirs = torch.nn.Transformer(512, 8, 6, 6, 2048)
    final_norms = 2 * 2 * 512
    assert ours == sum(p.numel() for p in theirs.parameters()) - final_norms
    assert isinstance(model.encoder.norm, torch.nn.Identity)


def test_the_convolution_sees_zeros_in_the_padding():
    module = ConvolutionModule(config(conv_kernel=5)).eval()
    x, mask = torch.randn(1, 9, 16), length_mask(torch.tensor([6]), 9)
    changed = x.clone()
    changed[:, 6:] += 10
    torch.testing.assert_close(module(x, mask)[:, :6], module(changed, mask)[:, :6])
    torch.testing.assert_close(module(x, mask)[:, :6], module(x[:, :6], None), atol=1e-6, rtol=1e-5)


def test_the_convolution_on_a_cpu_is_the_depthwise_convolution():
    module = ConvolutionModule(config(conv_kernel=5)).eval()
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(module._convolve(x), module.depthwise(x.mT).mT, atol=1e-6, rtol=1e-5)


def test_gradients_of_the_convolution_lie_as_its_weights_do():
    """Otherwise DDP warns, and copies the gradients more slowly."""
    module = ConvolutionModule(config(conv_kernel=5))
    module(torch.randn(2, 9, 16), None).sum().backward()
    assert all(p.grad.stride() == p.stride() for p in module.parameters())


@pytest.mark.filterwarnings("ignore")
def test_the_convolutions_backward_pass_returns_in_bfloat16():
    """oneDNN's bfloat16 depthwise backward pass hung on 53 utterances of 52 frames (torch 2.13, AVX512-BF16)."""
    module = ConvolutionModule(ModelConfig(d_model=144, num_heads=4))
    x = torch.randn(53, 52, 144, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x, None)
    out.float().sum().backward()
    assert torch.isfinite(x.grad).all()


def test_a_conformer_layer_is_two_half_steps_around_attention_and_convolution():
    layer = ConformerEncoderLayer(config(activation="silu")).eval()
    randomize(layer)
    x = torch.randn(2, 6, 16)
    y = x + 0.5 * layer.first_ffn(layer.first_ffn_residual.norm(x))
    z = layer.attention_residual.norm(y)
    y = y + layer.attention(z, z)
    y = y + layer.convolution(layer.convolution_residual.norm(y), None)
    y = y + 0.5 * layer.ffn(layer.ffn_residual.norm(y))
    torch.testing.assert_close(layer(x), layer.norm(y), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("encoder", ["transformer", "conformer"])
def test_torch_compile_takes_each_layer_whole_whatever_its_length(encoder, half):
    torch.manual_seed(0)
    model = Transformer(config(vocab_size=9, encoder=encoder, dropout=0.0)).train()
    inputs = [
        (torch.randn(2, T, 80), torch.tensor([T, T // 2]), torch.randint(4, 9, (2, U)), torch.tensor([U, 1]))
        for T, U in ((80, 5), (120, 7))
    ]
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        wanted = [model.eval()(*batch).log_probs for batch in inputs]
        model.train()  # in which layers that are not compiled are rounded elsewhere in bfloat16
        for layer in layers_of(model):
            layer.compile(fullgraph=True, dynamic=True, backend="eager")
        for batch, log_probs in zip(inputs, wanted, strict=True):
            torch.testing.assert_close(model(*batch).log_probs, log_probs)
    assert len(layers_of(model)) == model.config.encoder_layers + model.config.decoder_layers
