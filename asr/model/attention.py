"""Multi-head attention ("Attention Is All You Need", section 3.2.2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from asr.model.cache import StepPosition
from asr.model.config import ModelConfig
from asr.model.dot_product import attention_weights, scaled_dot_product_attention
from asr.model.dropout import Dropout, trains_on_cpu
from asr.model.flash_attention import fits, flash_attention
from asr.model.local_attention import local_attention
from asr.model.masks import causal_mask, either, window_mask
from asr.model.plain_attention import plain_attention
from asr.model.positions import rotate


class MultiHeadAttention(nn.Module):
    """Concat(head_1 .. head_H) W_O with head_i = Attention(Q W_Q, K W_K, V W_V). H·d_k and H·d_v need not be D.

    Keys and values can be projected once (`project`) and attended to many times (`attend`), as decoding does."""

    def __init__(
        self,
        config: ModelConfig,
        rotary: bool = False,
        window: tuple[int, int] | None = None,
        causal: bool = False,
    ):
        """`window`: how many keys before and after its own position a query attends to; None: all. `causal`: in
        self-attention no query sees a later key. Raises ValueError if both are given."""
        super().__init__()
        if window and causal:
            raise ValueError("causal attention has no window")
        D, H = config.d_model, config.num_heads
        self.num_heads = H
        self.key_dim, self.value_dim = config.key_dim, config.value_dim
        self.rotary = rotary
        self.window = window
        self.causal = causal
        self.query = nn.Linear(D, H * config.key_dim, bias=config.attention_bias)
        self.key = nn.Linear(D, H * config.key_dim, bias=config.attention_bias and config.key_bias)
        self.value = nn.Linear(D, H * config.value_dim, bias=config.attention_bias)
        self.output = nn.Linear(H * config.value_dim, D, bias=config.attention_bias)
        # queries, keys and values in one product: training and a GPU concatenate their weights at each call (unless
        # they are sharded, asr.training.sharding), a CPU decodes with one packed layer for all (asr.decode.packing)
        self.fuse_projections = True
        self.fused: nn.Module | None = None
        self.dropout = Dropout(config.dropout)
        widths = (config.key_dim, config.key_dim, config.value_dim, config.value_dim)
        for linear, width in zip((self.query, self.key, self.value, self.output), widths, strict=True):
            if config.attention_init == "xavier_uniform":
                nn.init.xavier_uniform_(linear.weight)
            else:
                nn.init.normal_(linear.weight, std=math.sqrt(2 / (D + width)))
            if linear.bias is not None:
                nn.init.zeros_(linear.bias)

    def forward(
        self,
        query: Tensor,
        key_value: Tensor | None = None,
        mask: Tensor | None = None,
        weights: list[Tensor] | None = None,
        kernel_lens: Tensor | None = None,
    ) -> Tensor:
        """`query (B, L_q, D)` attends to `key_value (B, L_k, D)`, or to itself (None) -> `(B, L_q, D)`; `mask` as in
        `attention_weights`. `kernel_lens (B,)`: how many keys there are before the padding, if the GPU kernels can run
        (`lens_for_kernels`) and `mask` hides only the padding, else None; for causal self-attention its values do not
        matter, only whether it is given.

        If `weights` is a list, the softmax's result `(B, H, L_q, L_k)` is appended to it."""
        if weights is None and not self.window:
            if kernel_lens is not None and fits(query, self.key_dim, self.value_dim):
                return self._flash(query, key_value, kernel_lens)
            if trains_on_cpu(self, query):
                return self._plain(query, key_value, mask)
        if key_value is None:
            return self._weigh(*self._project_all(query), mask, weights, self.causal)
        return self.attend(query, *self.project(key_value), mask=mask, weights=weights)

    def step(self, x: Tensor, past: tuple[Tensor, Tensor], newest: StepPosition) -> Tensor:
        """Self-attention of only the newest position: W hypotheses per utterance, `x (B, W, D)`, attend to the keys and
        values in `past (B, H, capacity, d)`, into which their own are written."""
        positions = torch.full((x.shape[1],), newest.position, device=x.device) if self.rotary else None
        Q, *written = self._project_all(x, positions)
        for cache, new in zip(past, written, strict=True):
            cache[:, :, newest.slots] = new
        return self._weigh(Q, *past, newest.mask)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys `(B, H, L, d_k)` and values `(B, H, L, d_v)` of `x (B, L, D)`, without positions."""
        return self._split(self.key(x)), self._split(self.value(x))

    def attend(
        self,
        query: Tensor,
        K: Tensor,
        V: Tensor,
        mask: Tensor | None = None,
        weights: list[Tensor] | None = None,
    ) -> Tensor:
        """`query (B, L_q, D)` attends to projected keys and values -> `(B, L_q, D)`."""
        return self._weigh(self._split(self.query(query)), K, V, mask, weights)

    def _project_all(self, x: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of self-attention `(B, H, L, d)`; `positions (L,)` as in `rotate`."""
        projected = self.fused(x) if self.fused else (self.query(x), self.key(x), self.value(x))
        Q, K, V = map(self._split, projected)
        return (rotate(Q, positions), rotate(K, positions), V) if self.rotary else (Q, K, V)

    def _weigh(
        self,
        Q: Tensor,
        K: Tensor,
        V: Tensor,
        mask: Tensor | None = None,
        weights: list[Tensor] | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Attention over projected heads, each `(B, H, L, d)`, followed by the output layer."""
        if weights is not None:
            if self.window:
                mask = either(mask, window_mask(K.shape[2], *self.window, K.device))
            if causal:
                mask = either(mask, causal_mask(K.shape[2], K.device))
            weights.append(attention_weights(Q, K, mask))
            heads = self.dropout(weights[-1]) @ V
        elif self.window:
            heads = local_attention(Q, K, V, *self.window, mask=mask, dropout=self.dropout)
        else:
            heads = scaled_dot_product_attention(Q, K, V, mask, self.dropout, causal)
        return self.output(heads.transpose(1, 2).flatten(2))

    def _flash(self, query: Tensor, key_value: Tensor | None, kernel_lens: Tensor) -> Tensor:
        """`forward` with the kernels of `asr.model.flash_attention`."""
        q, k, v = (None if x is None else x.contiguous() for x in self._project_together(query, key_value))
        seen = None if self.causal and key_value is None else kernel_lens
        return self.output(flash_attention(q, k, v, self.num_heads, seen, self.dropout.share).flatten(2))

    def _plain(self, query: Tensor, key_value: Tensor | None, mask: Tensor | None) -> Tensor:
        """`forward` with `asr.model.plain_attention`."""
        if self.causal and key_value is None:
            mask = either(mask, causal_mask(query.shape[1], query.device))
        q, k, v = self._project_together(query, key_value)
        return self.output(plain_attention(q, k, v, self.num_heads, mask, self.dropout.share).flatten(2))

    def _project_together(self, query: Tensor, key_value: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Queries, keys and values `(B, L, n H, d)`, as `flash_attention` takes them: in one tensor or two, if their
        layers have the same input and no more is done to them."""
        if self.rotary or not self.fuse_projections or self.key_dim != self.value_dim:
            if key_value is None:
                parts = self._project_all(query)
            else:
                parts = self._split(self.query(query)), *self.project(key_value)
            q, k, v = (x.transpose(1, 2) for x in parts)
            return q, k, v
        if key_value is None:
            return self._together(query, self.query, self.key, self.value), None, None
        return self._together(query, self.query), self._together(key_value, self.key, self.value), None

    def _together(self, x: Tensor, *linears: nn.Linear) -> Tensor:
        """The heads of `x (B, L, D)` under all n `linears`, computed in one product: `(B, L, n H, d)`."""
        weight = torch.cat([linear.weight for linear in linears])
        biases = [weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
        return nn.functional.linear(x, weight, torch.cat(biases)).unflatten(2, (len(linears) * self.num_heads, -1))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
