"""What self-attention remembers while hypotheses grow: keys and values that are written once and never moved.

A beam search reorders its hypotheses at every step. Moving their keys and values along costs more than the decoder's
arithmetic; here they stay in the slots they were written to, and a mask tells which slots are a hypothesis' ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from asr.model.config import ModelConfig
from asr.model.masks import additive_mask

GROWTH = 64  # positions by which a cache grows


@dataclass(frozen=True)
class AttentionCache:
    """The past of B utterances with W hypotheses each. A step writes into it in place: go on from its result alone."""

    layers: list[tuple[Tensor, Tensor]]  # per layer: keys, values (B, H, capacity·W, d); slot l·W + w
    foreign: Tensor  # (B, W, capacity, W): True where a slot holds no ancestor of the hypothesis
    position: int  # how many positions are filled

    @classmethod
    def empty(cls, config: ModelConfig, layers: int, batch: int, width: int, like: Tensor) -> AttentionCache:
        """No positions yet, in the type and on the device of `like`."""
        B, H = batch, config.num_heads
        past = [
            (
                like.new_zeros(B, H, GROWTH * width, config.key_dim),
                like.new_zeros(B, H, GROWTH * width, config.value_dim),
            )
            for _ in range(layers)
        ]
        return cls(past, torch.ones(B, width, GROWTH, width, dtype=torch.bool, device=like.device), 0)

    def next_position(self) -> tuple[AttentionCache, Tensor | None]:
        """The cache with room for one more position in which each hypothesis sees itself, and the additive mask
        `(B, 1, W, (position + 1)·W)` of that step; None where there is nothing to mask."""
        cache, W = self, self.foreign.shape[1]
        if self.position == self.foreign.shape[2]:
            slots, positions = (0, 0, 0, GROWTH * W), (0, 0, 0, GROWTH)
            layers = [(nn.functional.pad(K, slots), nn.functional.pad(V, slots)) for K, V in self.layers]
            cache = replace(self, layers=layers, foreign=nn.functional.pad(self.foreign, positions, value=True))
        cache = replace(cache, position=self.position + 1)
        if W == 1:
            return cache, None
        cache.foreign[:, :, self.position] = ~torch.eye(W, dtype=torch.bool, device=self.foreign.device)
        mask = cache.foreign[:, :, : cache.position].flatten(2).unsqueeze(1)
        return cache, additive_mask(mask, cache.layers[0][0].dtype)

    def reorder(self, parents: Tensor) -> AttentionCache:
        """The cache in which hypothesis w of an utterance goes on from hypothesis `parents[b, w]`, `(B, W)`."""
        if parents.shape[1] == 1:
            return self
        index = parents[:, :, None, None].expand(-1, -1, *self.foreign.shape[2:])
        return replace(self, foreign=self.foreign.gather(1, index))

    def select(self, utterances: Tensor) -> AttentionCache:
        """The cache of some of the utterances."""
        layers = [(K.index_select(0, utterances), V.index_select(0, utterances)) for K, V in self.layers]
        return replace(self, layers=layers, foreign=self.foreign.index_select(0, utterances))
