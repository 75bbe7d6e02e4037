"""Layers: convolution, residual connections, and the encoder and decoder layers built from them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from asr.model.attention import MultiHeadAttention
from asr.model.autocast import to_autocast_dtype
from asr.model.cache import StepPosition
from asr.model.config import ModelConfig
from asr.model.depthwise import depthwise_convolution
from asr.model.dropout import Dropout
from asr.model.feed_forward import FeedForward


class Residual(nn.Module):
    """A sub-layer's residual connection and layer norm.

    Post-norm (the paper): norm(x + dropout(sub(x))). Pre-norm: x + dropout(sub(norm(x))). `weight` scales the
    sub-layer's output (the Conformer's half steps). Under autocast the residual stream of a pre-norm stack, which grows
    from layer to layer, stays float32; a post-norm layer's output, which is normalised, is cast to autocast's type."""

    def __init__(self, config: ModelConfig, weight: float = 1.0):
        super().__init__()
        self.norm = nn.LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)
        self.norm_first = config.norm_first
        self.weight = weight

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        if self.norm_first:
            return torch.add(x, self.dropout(sublayer(to_autocast_dtype(self.norm(x)))), alpha=self.weight)
        x = to_autocast_dtype(x)
        return to_autocast_dtype(self.norm(torch.add(x, self.dropout(sublayer(x)), alpha=self.weight)))


class TransformerEncoderLayer(nn.Module):
    """Self-attention and feed-forward ("Attention Is All You Need", section 3.1)."""

    def __init__(self, config: ModelConfig, causal: bool = False):
        """`causal`: no position sees a later one, as in a language model."""
        super().__init__()
        self.attention = MultiHeadAttention(config, config.positions == "rotary", config.attention_window, causal)
        self.attention_residual = Residual(config)
        self.ffn = FeedForward(config)
        self.ffn_residual = Residual(config)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        weights: list[Tensor] | None = None,
        kernel_lens: Tensor | None = None,
    ) -> Tensor:
        """`x (B, L, D)`, `mask (B, 1, 1, L)` of the padding, `kernel_lens` as for attention -> `(B, L, D)`."""
        x = self.attention_residual(x, lambda y: self.attention(y, mask=mask, weights=weights, kernel_lens=kernel_lens))
        return self.ffn_residual(x, self.ffn)

    def step(self, x: Tensor, past: tuple[Tensor, Tensor], newest: StepPosition) -> Tensor:
        """The newest position of W hypotheses, as in `MultiHeadAttention.step`, for language models."""
        x = self.attention_residual(x, lambda y: self.attention.step(y, past, newest))
        return self.ffn_residual(x, self.ffn)


class ConvolutionModule(nn.Module):
    """Pointwise conv, GLU, depthwise conv, norm, SiLU, pointwise conv (Gulati et al. 2020, section 2.2).

    Layer norm replaces batch norm: its result does not depend on the rest of the batch."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        D = config.d_model
        self.expand = nn.Linear(D, 2 * D)
        self.depthwise = nn.Conv1d(D, D, config.conv_kernel, padding=config.conv_kernel // 2, groups=D)
        self.norm = nn.LayerNorm(D)
        self.output = nn.Linear(D, D)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`x (B, L, D)`, `mask (B, 1, 1, L)`: padding that the convolution sees as zeros."""
        x = nn.functional.glu(self.expand(x), dim=-1)
        if mask is not None:
            x = x.masked_fill(mask[:, 0, 0, :, None], 0.0)
        return self.output(nn.functional.silu(self.norm(self._convolve(x))))

    def _convolve(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu":
            # in float32, since oneDNN's bfloat16 depthwise backward pass never returns for some shapes (53 x 52 frames)
            with torch.autocast("cpu", enabled=False):
                return self._depthwise(x.float()).to(self.norm.weight.dtype)
        if x.dtype == torch.float32 and not torch.compiler.is_compiling():
            return self.depthwise(x.transpose(1, 2)).transpose(1, 2)  # a third of the time of cuDNN in two dimensions
        return self._depthwise(x)

    def _depthwise(self, x: Tensor) -> Tensor:
        return depthwise_convolution(x, self.depthwise.weight.to(x.dtype), self.depthwise.bias.to(x.dtype))


class ConformerEncoderLayer(nn.Module):
    """Half a feed-forward, self-attention, convolution, half a feed-forward, norm (Gulati et al. 2020)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.first_ffn = FeedForward(config)
        self.first_ffn_residual = Residual(config, weight=0.5)
        self.attention = MultiHeadAttention(config, config.positions == "rotary", config.attention_window)
        self.attention_residual = Residual(config)
        self.convolution = ConvolutionModule(config)
        self.convolution_residual = Residual(config)
        self.ffn = FeedForward(config)
        self.ffn_residual = Residual(config, weight=0.5)
        self.norm = nn.LayerNorm(config.d_model)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        weights: list[Tensor] | None = None,
        kernel_lens: Tensor | None = None,
    ) -> Tensor:
        """`x (B, L, D)`, `mask (B, 1, 1, L)` of the padding, `kernel_lens` as for attention -> `(B, L, D)`."""
        x = self.first_ffn_residual(x, self.first_ffn)
        x = self.attention_residual(x, lambda y: self.attention(y, mask=mask, weights=weights, kernel_lens=kernel_lens))
        x = self.convolution_residual(x, lambda y: self.convolution(y, mask))
        return self.norm(self.ffn_residual(x, self.ffn))


class TransformerDecoderLayer(nn.Module):
    """Causal self-attention, attention to the encoder's memory, feed-forward."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attention = MultiHeadAttention(config, config.positions_of_decoder == "rotary", causal=True)
        self.self_attention_residual = Residual(config)
        self.cross_attention = MultiHeadAttention(config)
        self.cross_attention_residual = Residual(config)
        self.ffn = FeedForward(config)
        self.ffn_residual = Residual(config)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        memory_mask: Tensor | None = None,
        weights: list[Tensor] | None = None,
        kernel_lens: Tensor | None = None,
    ) -> Tensor:
        """`x (B, T', D)`, of which each position sees itself and earlier ones, `memory (B, M, D)` with
        `memory_mask (B, 1, 1, M)`, `kernel_lens` as for attention."""
        x = self.self_attention_residual(x, lambda y: self.self_attention(y, kernel_lens=kernel_lens))
        x = self.cross_attention_residual(
            x, lambda y: self.cross_attention(y, memory, memory_mask, weights, kernel_lens)
        )
        return self.ffn_residual(x, self.ffn)

    def step(
        self,
        x: Tensor,
        past: tuple[Tensor, Tensor],
        newest: StepPosition,
        cross: tuple[Tensor, Tensor],
        memory_mask: Tensor,
    ) -> Tensor:
        """The newest position of W hypotheses per utterance, `x (B, W, D)`; `past` as in `MultiHeadAttention.step`;
        `cross`: the memory's keys and values `(B, H, M, d)`, to which the W hypotheses are W queries."""
        x = self.self_attention_residual(x, lambda y: self.self_attention.step(y, past, newest))
        x = self.cross_attention_residual(x, lambda y: self.cross_attention.attend(y, *cross, mask=memory_mask))
        return self.ffn_residual(x, self.ffn)


def layers_of(stack: nn.Module) -> list[nn.Module]:
    """The encoder and decoder layers in `stack`."""
    kinds = TransformerEncoderLayer | ConformerEncoderLayer | TransformerDecoderLayer
    return [module for module in stack.modules() if isinstance(module, kinds)]


@torch.no_grad()
def start_near_identity(stack: nn.ModuleList) -> None:
    """Initialises a pre-norm stack: biases to zero, and what each sub-layer adds to the residual stream scaled down by
    the square root of the number of sub-layers, as in GPT-2 (Radford et al. 2019, section 2.3).

    Otherwise each sub-layer adds a signal that is constant over time (biases, still uniform attention) and about as
    large as its input; a dozen sub-layers drown the speech, and CTC stays on its plateau of blanks for a long time."""
    for module in stack.modules():
        if isinstance(module, nn.Linear | nn.Conv1d) and module.bias is not None:
            module.bias.zero_()
    linears = last_linears(stack)
    for linear in linears:
        linear.weight.div_(len(linears) ** 0.5)


def last_linears(stack: nn.Module) -> list[nn.Linear]:
    """The last linear layer of each sub-layer in `stack`, whose output is added to the residual stream."""
    linears = []
    for module in stack.modules():
        if isinstance(module, FeedForward):
            linears.append(module[-1])
        elif isinstance(module, MultiHeadAttention | ConvolutionModule):
            linears.append(module.output)
    return linears
