import shutil

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from asr.model.config import ModelConfig
from asr.model.depthwise import _operator, depthwise_convolution
from asr.model.layers import ConvolutionModule


def test_each_dimension_has_a_kernel_of_its_own():
    x, weight, bias = torch.randn(2, 7, 3), torch.randn(3, 1, 5), torch.randn(3)
    padded = torch.nn.functional.pad(x, (0, 0, 2, 2))
    expected = torch.stack([(padded[:, t : t + 5] * weight[:, 0].T).sum(dim=1) + bias for t in range(7)], dim=1)
    torch.testing.assert_close(depthwise_convolution(x, weight, bias), expected)


def test_the_operator_has_its_values_and_gradients():
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 7, 3), (3, 1, 5), (3,))]
    found = []
    for way in (depthwise_convolution, _operator):
        out = way(*inputs)
        found.append((out, *torch.autograd.grad((out * out.detach().cos()).sum(), inputs)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    torch.library.opcheck(_operator, inputs)


@pytest.mark.skipif(not shutil.which("g++"), reason="inductor compiles C++ on a CPU")
@inductor.patch({"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False})  # both cost more than the kernels
def test_compiled_it_is_one_code_for_all_lengths():
    module = ConvolutionModule(ModelConfig(d_model=16, num_heads=2, ffn_dim=32, conv_kernel=9))
    inputs = [torch.randn(B, L, 16, requires_grad=True) for B, L in ((5, 65), (4, 43), (6, 39))]

    def run() -> list[tuple[torch.Tensor, ...]]:
        outs = [module(x, None) for x in inputs]
        weights = tuple(module.parameters())
        return [
            (out, *torch.autograd.grad(out.sin().sum(), (x, *weights))) for x, out in zip(inputs, outs, strict=True)
        ]

    eager = run()
    torch._dynamo.reset()
    counters.clear()
    module.compile(dynamic=True)
    for compiled, expected in zip(run(), eager, strict=True):
        for one, other in zip(compiled, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-3)
    assert counters["stats"]["unique_graphs"] == 1
