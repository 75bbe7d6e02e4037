import pytest
import torch
from torch import nn

from asr.model.posteriors import log_posteriors


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("V", [30, 32])
def test_a_padded_vocabulary_gives_the_same_posteriors_and_gradients(V, bias):
    output, x, upstream = nn.Linear(6, V, bias=bias), torch.randn(2, 5, 6), torch.randn(2, 5, V)
    found = []
    for given in (x, x.as_subclass(OnGpu)):
        log_probs = log_posteriors(output, given)
        found.append((log_probs, *torch.autograd.grad((log_probs * upstream).sum(), list(output.parameters()))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other.as_subclass(torch.Tensor))
