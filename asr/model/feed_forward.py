"""The position-wise feed-forward layer ("Attention Is All You Need", section 3.3)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from asr.model.autocast import dtype_of_products
from asr.model.config import ModelConfig
from asr.model.dropout import Dropout, draw_kept, keep, trains_on_cpu

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}
GRADIENTS = {
    nn.ReLU: partial(torch.ops.aten.threshold_backward, threshold=0),
    nn.GELU: torch.ops.aten.gelu_backward,
    nn.SiLU: torch.ops.aten.silu_backward,
}


class FeedForward(nn.Sequential):
    """W2 · dropout(act(W1 x)), the same at every position."""

    def __init__(self, config: ModelConfig):
        super().__init__(
            nn.Linear(config.d_model, config.ffn_dim),
            ACTIVATIONS[config.activation](),
            Dropout(config.dropout),
            nn.Linear(config.ffn_dim, config.d_model),
        )

    def forward(self, x: Tensor) -> Tensor:
        """`(..., D)` -> `(..., D)`."""
        expand, activation, dropout, output = self
        if trains_on_cpu(self, x):
            dtype = dtype_of_products(x)
            parts = (part.to(dtype) for part in (x, expand.weight, expand.bias, output.weight, output.bias))
            return _OnCPU.apply(*parts, activation, dropout.share)
        x = expand(x)
        return output(dropout.of_relu(x) if isinstance(activation, nn.ReLU) else dropout(activation(x)))


class _OnCPU(torch.autograd.Function):
    """The whole layer in training on a CPU, which reads and writes the hidden activations, its largest tensors, as
    seldom as possible: dropout and gradients are computed in place, and dropout's scale is in the second layer's
    weights. ReLU is in place, too: where its result is zero or dropped there is no gradient."""

    @staticmethod
    def forward(
        ctx, x: Tensor, W1: Tensor, b1: Tensor, W2: Tensor, b2: Tensor, activation: nn.Module, p: float
    ) -> Tensor:
        inner = linear(x, W1, b1)
        hidden = inner.relu_() if isinstance(activation, nn.ReLU) else activation(inner)
        kept, ctx.scale = None, 1.0
        if p:
            kept, ctx.scale = draw_kept(hidden.shape, p)
            keep(hidden, kept, out=hidden)
        if isinstance(activation, nn.ReLU):
            inner = kept = None
        ctx.save_for_backward(x, W1, W2, inner, hidden, kept)
        ctx.activation = type(activation)
        return linear(hidden, W2 * ctx.scale, b2)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, W1, W2, inner, hidden, kept = ctx.saved_tensors
        of_x, of_W1, _, of_W2, *_ = ctx.needs_input_grad
        g_hidden = gradient @ (W2 * ctx.scale)
        if kept is not None:
            keep(g_hidden, kept, out=g_hidden)
        GRADIENTS[ctx.activation](g_hidden, hidden if inner is None else inner, grad_input=g_hidden)
        shape = x.shape
        gradient, g_hidden, x, hidden = (part.flatten(0, -2) for part in (gradient, g_hidden, x, hidden))
        g_W2 = (gradient.T @ hidden).mul_(ctx.scale) if of_W2 else None
        g_W1 = g_hidden.T @ x if of_W1 else None
        g_x = (g_hidden @ W1).view(shape) if of_x else None
        return g_x, g_W1, _sum_of_rows(g_hidden), g_W2, gradient.sum(0), None, None


def _sum_of_rows(x: Tensor) -> Tensor:
    """x `(N, D)` -> `(D,)`, as a product, which takes half the time of `x.sum(0)`."""
    return (x.new_ones(1, len(x)) @ x)[0]
