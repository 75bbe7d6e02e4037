"""The position-wise feed-forward layer ("Attention Is All You Need", section 3.3)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from asr.model.autocast import dtype_of_products
from asr.model.config import ModelConfig
from asr.model.dropout import Dropout, draw_kept, keep, trains_on_cpu

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}


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
        if not isinstance(activation, nn.ReLU):
            return output(dropout(activation(expand(x))))
        if trains_on_cpu(self, x):
            dtype = dtype_of_products(x)
            parts = (part.to(dtype) for part in (x, expand.weight, expand.bias, output.weight, output.bias))
            return _WithReLU.apply(*parts, dropout.share)
        return output(dropout.of_relu(expand(x)))


class _WithReLU(torch.autograd.Function):
    """The whole layer on a CPU, which then reads and writes the hidden activations, its largest tensors, half as often:
    ReLU, dropout and their gradients are computed in place, and dropout's scale is in the weights of the second layer.
    """

    @staticmethod
    def forward(ctx, x: Tensor, W1: Tensor, b1: Tensor, W2: Tensor, b2: Tensor, p: float) -> Tensor:
        hidden = linear(x, W1, b1).relu_()
        ctx.scale = 1.0
        if p:
            kept, ctx.scale = draw_kept(hidden.shape, p)
            keep(hidden, kept, out=hidden)
        ctx.save_for_backward(x, W1, W2, hidden)
        return linear(hidden, W2 * ctx.scale, b2)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, W1, W2, hidden = ctx.saved_tensors
        of_x, of_W1, _, of_W2, *_ = ctx.needs_input_grad
        shape = x.shape
        gradient, x, hidden = (part.flatten(0, -2) for part in (gradient, x, hidden))
        g_W2 = (gradient.T @ hidden).mul_(ctx.scale) if of_W2 else None
        g_hidden = gradient @ (W2 * ctx.scale)
        torch.ops.aten.threshold_backward(g_hidden, hidden, 0, grad_input=g_hidden)
        g_W1 = g_hidden.T @ x if of_W1 else None
        g_x = (g_hidden @ W1).view(shape) if of_x else None
        return g_x, g_W1, _sum_of_rows(g_hidden), g_W2, gradient.sum(0), None


def _sum_of_rows(x: Tensor) -> Tensor:
    """x `(N, D)` -> `(D,)`, as a product, which takes half the time of `x.sum(0)`."""
    return (x.new_ones(1, len(x)) @ x)[0]
