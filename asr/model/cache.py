"""The self-attention cache of growing hypotheses: keys and values that stay where they were written.

A beam search reorders its hypotheses at every step. Moving their keys and values along costs more than the decoder's
arithmetic; here they stay in their slots, and a mask tells which slots are a hypothesis' ancestors. The hypotheses of a
beam soon share most of their past: every few steps the slots without descendants are dropped.

Attention covers all slots, used or not: a cache grows by several positions at once, so that its keys and values are
contiguous and their products have few shapes (on a CPU each new shape is another kernel to compile).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asr.model.config import ModelConfig
from asr.model.masks import additive_mask
from asr.model.rows import select_rows

GROWTH = 8  # positions by which a cache grows


class StepPosition(NamedTuple):
    """The slots that the current step writes its keys and values to, and the slots that it attends to."""

    position: int
    slots: slice  # for its keys and values, one per hypothesis
    mask: Tensor  # (B, 1, W, capacity), additive: which slots each hypothesis sees


@dataclass(frozen=True)
class AttentionCache:
    """The past of B utterances with W hypotheses each. A step writes into its tensors in place and returns the cache
    to continue with; the old one must no longer be used."""

    layers: list[tuple[Tensor, Tensor]]  # per layer: keys, values (B, H, capacity, d)
    hidden: Tensor  # (B, W, capacity): True where a slot holds no ancestor of the hypothesis, or nothing yet
    filled: int  # how many slots are in use
    position: int  # how many steps have been made

    @classmethod
    def empty(cls, config: ModelConfig, layers: int, batch: int, width: int, like: Tensor) -> AttentionCache:
        """A cache without any positions yet, in the type and on the device of `like`."""
        B, H, capacity = batch, config.num_heads, GROWTH * width
        past = [
            (like.new_zeros(B, H, capacity, config.key_dim), like.new_zeros(B, H, capacity, config.value_dim))
            for _ in range(layers)
        ]
        return cls(past, torch.ones(B, width, capacity, dtype=torch.bool, device=like.device), 0, 0)

    def next_position(self) -> tuple[AttentionCache, StepPosition]:
        """The cache with W more slots in use, of which each hypothesis sees its own, and the position of the step."""
        W = self.hidden.shape[1]
        end = self.filled + W
        cache = self if end <= self.hidden.shape[2] else self._longer(GROWTH * W)
        slots = slice(self.filled, end)
        cache.hidden[:, :, slots] = ~torch.eye(W, dtype=torch.bool, device=self.hidden.device)
        mask = additive_mask(cache.hidden[:, None], cache.layers[0][0].dtype)
        return replace(cache, filled=end, position=self.position + 1), StepPosition(self.position, slots, mask)

    def reorder(self, parents: Tensor) -> AttentionCache:
        """The cache in which hypothesis w of utterance b continues hypothesis `parents[b, w]`, `(B, W)`."""
        return replace(self, hidden=select_rows(self.hidden, parents))

    def compact(self) -> AttentionCache:
        """The cache without slots that no hypothesis descends from, if that saves a tenth; a host-device sync."""
        lives = ~self.hidden.all(dim=1)
        count = int(lives.sum(dim=1).max())
        if 10 * count > 9 * self.filled:
            return self
        room = min(count + -count % (GROWTH * self.hidden.shape[1]), lives.shape[1])
        kept = lives.byte().argsort(dim=1, descending=True, stable=True)[:, :room]  # dead slots stay hidden
        B, H = self.layers[0][0].shape[:2]
        of_heads = kept.repeat_interleave(H, dim=0)
        layers = [
            tuple(select_rows(x.flatten(0, 1), of_heads).unflatten(0, (B, H)) for x in layer) for layer in self.layers
        ]
        hidden = self.hidden.gather(2, kept[:, None].expand(-1, self.hidden.shape[1], -1))
        return replace(self, layers=layers, hidden=hidden, filled=count)

    def _longer(self, room: int) -> AttentionCache:
        """The cache with `room` more unused slots: zeros, which have no weight as long as they are masked."""
        layers = [tuple(nn.functional.pad(x, (0, 0, 0, room)) for x in layer) for layer in self.layers]
        return replace(self, layers=layers, hidden=nn.functional.pad(self.hidden, (0, room), value=True))
