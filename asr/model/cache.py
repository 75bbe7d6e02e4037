"""What self-attention remembers while hypotheses grow: keys and values that stay where they were written.

A beam search reorders its hypotheses at every step. Moving their keys and values along costs more than the decoder's
arithmetic; here they stay in their slots, and a mask tells which slots are a hypothesis' ancestors. The hypotheses of a
beam soon share most of their past: every few steps the slots without descendants are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor, nn

from asr.model.config import ModelConfig
from asr.model.masks import additive_mask

GROWTH = 16  # positions by which a cache grows


@dataclass(frozen=True)
class AttentionCache:
    """The past of B utterances with W hypotheses each. A step writes into it in place: go on from its result alone."""

    layers: list[tuple[Tensor, Tensor]]  # per layer: keys, values (B, H, capacity, d)
    foreign: Tensor  # (B, W, capacity): True where a slot holds no ancestor of the hypothesis
    filled: int  # how many slots are in use
    position: int  # how many steps were made

    @classmethod
    def empty(cls, config: ModelConfig, layers: int, batch: int, width: int, like: Tensor) -> AttentionCache:
        """No positions yet, in the type and on the device of `like`."""
        B, H, capacity = batch, config.num_heads, GROWTH * width
        past = [  # a slot is written before it is read
            (like.new_empty(B, H, capacity, config.key_dim), like.new_empty(B, H, capacity, config.value_dim))
            for _ in range(layers)
        ]
        return cls(past, torch.zeros(B, width, capacity, dtype=torch.bool, device=like.device), 0, 0)

    def next_position(self) -> tuple[AttentionCache, Tensor]:
        """The cache with W more slots in use, in which each hypothesis sees its own one, and the additive mask
        `(B, 1, W, slots in use)` of that step."""
        cache, W = self, self.foreign.shape[1]
        end = self.filled + W
        if end > self.foreign.shape[2]:
            room = (0, 0, 0, GROWTH * W)
            layers = [(nn.functional.pad(K, room), nn.functional.pad(V, room)) for K, V in self.layers]
            cache = replace(self, layers=layers, foreign=nn.functional.pad(self.foreign, (0, GROWTH * W)))
        cache.foreign[:, :, self.filled : end] = ~torch.eye(W, dtype=torch.bool, device=self.foreign.device)
        mask = additive_mask(cache.foreign[:, None, :, :end], cache.layers[0][0].dtype)
        return replace(cache, filled=end, position=self.position + 1), mask

    def reorder(self, parents: Tensor) -> AttentionCache:
        """The cache in which hypothesis w of an utterance goes on from hypothesis `parents[b, w]`, `(B, W)`."""
        return replace(self, foreign=self.foreign.gather(1, parents[:, :, None].expand_as(self.foreign)))

    def select(self, utterances: Tensor) -> AttentionCache:
        """The cache of some of the utterances."""
        layers = [(K.index_select(0, utterances), V.index_select(0, utterances)) for K, V in self.layers]
        return replace(self, layers=layers, foreign=self.foreign.index_select(0, utterances))

    def compact(self) -> AttentionCache:
        """The cache without the slots that are nobody's ancestors, where that saves a quarter; a host-device sync."""
        lives = ~self.foreign[:, :, : self.filled].all(dim=1)
        count = int(lives.sum(dim=1).max())
        if 4 * count > 3 * self.filled:
            return self
        kept = lives.byte().argsort(dim=1, descending=True, stable=True)[:, :count]
        for x, slots in ((self.foreign, kept[:, None]), *((x, kept[:, None, :, None]) for x in chain(*self.layers))):
            x[:, :, :count] = x.gather(2, slots.expand(*x.shape[:2], -1, *x.shape[3:]))
        return replace(self, filled=count)
