"""Batches: utterances of similar length, as tensors of few different shapes."""

from __future__ import annotations

import contextlib
import math
import random
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from lhotse import CutSet, MonoCut
from lhotse.dataset import DynamicBucketingSampler, SimpleCutSampler
from lhotse.dataset.sampling.base import CutSampler
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from asr.audio.reading import SAMPLE_RATE, STEPS_PER_SECOND
from asr.corpus import Skipped, input_kind, iterate
from asr.text.tokenizer import Tokenizer
from asr.training.conditions import Conditions
from asr.training.resuming import step_seed

BUCKETS = 20  # with which 5 to 7 % of the frames are padding
LABELS = 8  # labels and texts are padded to multiples of this


class Bucket(NamedTuple):
    """A bucket of lengths: the seconds to which its utterances are padded, and the number of utterances in a batch.

    All its batches have the same shape (and one more for each speed). Kernels are built and memory is cut for a shape:
    with ever new shapes, training on a CPU spends a third of its time on both."""

    seconds: float
    utterances: int


def make_buckets(durations: list[float], batch_seconds: float) -> list[Bucket]:
    """At most `BUCKETS` buckets with equal shares of the audio, from short to long; fewer for little audio, so that
    each keeps about two batches. The batches of a bucket are about equally full."""
    longest = np.sort(durations)
    sound = longest.cumsum()
    count = min(BUCKETS, max(1, int(sound[-1] / batch_seconds / 2)))
    last = np.searchsorted(sound, sound[-1] * np.arange(1, count + 1) / count).clip(max=len(longest) - 1)
    edges = np.unique(longest[last])
    sizes = np.diff(np.searchsorted(longest, edges, side="right"), prepend=0)
    batches = np.ceil(sizes / np.maximum(1, batch_seconds // edges))
    utterances = np.ceil(sizes / batches).astype(int)
    return [Bucket(*bucket) for bucket in zip(edges.tolist(), utterances.tolist(), strict=True)]


class EpochOrder:
    """The cuts of an epoch, reshuffled for each epoch; the cuts of a shard stay together, in their order."""

    def __init__(self, cuts: Iterable[MonoCut], seed: int):
        together = defaultdict(list)
        for cut in cuts:
            together[(cut.custom or {}).get("shard", ("", cut.id))].append(cut)
        self.together = list(together.values())
        self.seed, self.epoch = seed, 0

    def __iter__(self) -> Iterator[MonoCut]:
        order = random.Random(step_seed(self.seed, self.epoch)).sample(self.together, len(self.together))
        return chain.from_iterable(order)


class Dealer(CutSampler):
    """Deals the batches out to the processes, as many in each round as there are processes.

    If fewer are left for the last round, the longest are halved; a process without an utterance gets an empty batch.
    Lhotse itself mixes what is left then, and a batch of short utterances that gets a long one takes several times the
    memory; and it repeats utterances if fewer are left than there are processes."""

    def __next__(self) -> CutSet:
        self.allow_iter_to_reset_state()
        batches = [self._next_batch()]
        with contextlib.suppress(StopIteration):
            while len(batches) < self.world_size:
                batches.append(self._next_batch())
        while len(batches) < self.world_size:
            longest = max(batches, key=lambda batch: (len(batch) > 1, sum(cut.duration for cut in batch)))
            batches.remove(longest)
            cuts = list(longest)
            batches += CutSet.from_cuts(cuts[::2]), CutSet.from_cuts(cuts[1::2])
        return batches[self.rank]


class PlainSampler(Dealer, SimpleCutSampler):
    """Batches in the order of the cuts, or of a shuffle."""


class BucketSampler(Dealer, DynamicBucketingSampler):
    """Batches drawn at random from the next 20,000 cuts in the epoch's order; with shards, from the next few shards."""

    def __init__(self, cuts: CutSet, seed: int, **settings):
        self.order = EpochOrder(cuts, seed)
        super().__init__(CutSet(self.order), shuffle=True, seed=seed, **settings)

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.order.epoch = epoch


class Batch(NamedTuple):
    """B utterances, padded with zeros; B = 0 if none of the batch could be read."""

    inputs: Tensor  # (B, N) samples, (B, T, d) matrices, or (B, T) token ids
    lens: Tensor  # (B,) in samples, frames or tokens
    Y: Tensor  # (B, U)
    Y_lens: Tensor  # (B,)
    texts: list[str]  # normalised
    speed: float  # at which it is played in training
    unread: int = 0  # further utterances, which could not be read


class SpeechDataset(Dataset):
    """Turns a batch of cuts and its seed into a `Batch`, padded to its bucket's length or, as it is played, to
    the front end's window; unreadable cuts are left out.

    The whole batch has one speed: drawing it for each utterance would undo what the buckets save (17 % of AN4's frames
    were padding then)."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        speeds: list[float],
        buckets: list[Bucket],
        most_labels: int | None = None,
        conditions: Conditions | None = None,
        most_text_tokens: int | None = None,
        window: float = 0.0,
    ):
        """`tokenizer` None: there are no labels; `most_labels`: how many labels the decoder has positions for,
        `most_text_tokens`: how many tokens of a text the encoder has positions for, None: any number; `conditions`:
        the recording conditions to simulate, None: audio stays as it was recorded; `window`: the seconds to which the
        front end pads what is shorter, as it is played."""
        self.tokenizer = tokenizer
        self.conditions = conditions
        self.most_labels, self.most_text_tokens = most_labels, most_text_tokens
        self.speeds, self.window = speeds, window
        self.skipped = Skipped("reading")  # by this process, in all epochs
        self.seconds = [bucket.seconds for bucket in buckets]

    def __getitem__(self, batch: tuple[CutSet, int]) -> Batch:
        cuts, seed = batch
        inputs, texts = [], []
        speed = round(random.Random(seed).choice(self.speeds), 2)  # as it is played
        first = cuts[0].id if len(cuts) else ""  # empty if fewer utterances are left than processes
        draw = random.Random(f"{seed} {first}")  # that no other process has at the same time
        for cut, sound in iterate(cuts, self.skipped):
            if self.conditions:
                sound = self.conditions(sound, draw)
            inputs.append(self._labels(sound) if isinstance(sound, str) else torch.from_numpy(sound))
            texts.append(cut.supervisions[0].text)
        if not inputs:
            nothing = torch.zeros(0, dtype=torch.int64)
            return Batch(torch.zeros(0, 1), nothing, nothing[:, None], nothing, [], speed, len(cuts))
        labels = [self._labels(text) for text in texts]
        longest = max(cut.duration for cut in cuts)
        seconds = self.seconds[bisect_left(self.seconds, longest)]
        if longest <= self.window * speed:  # slower, it would not fit into the window with all of its silence
            seconds = self.window * speed
        rate = STEPS_PER_SECOND if cuts[0].recording is None else SAMPLE_RATE
        if input_kind(cuts[0]) == "text":  # which has fewer tokens than the characters that its bucket counts
            length = rounded(max(map(len, inputs)), self.most_text_tokens)
        else:  # a file may be a little longer than stated
            length = math.ceil(seconds * rate)
            inputs = [x[:length] for x in inputs]
        return Batch(
            _padded(inputs, length),
            torch.tensor([len(x) for x in inputs]),
            _padded(labels, rounded(max(map(len, labels)), self.most_labels)),
            torch.tensor([len(y) for y in labels]),
            texts,
            speed,
            len(cuts) - len(texts),
        )

    def _labels(self, text: str) -> Tensor:
        return torch.tensor(self.tokenizer.encode(text) if self.tokenizer else [], dtype=torch.int64)


class TimedLoader(DataLoader):
    """Measures how long its user has waited for batches."""

    waited = 0.0  # seconds

    def __iter__(self) -> Iterator[Batch]:
        asked, end = time.monotonic(), object()
        batches = super().__iter__()  # which starts the workers and draws their first batches
        while True:
            batch = next(batches, end)
            self.waited += time.monotonic() - asked
            if batch is end:
                return
            yield batch
            asked = time.monotonic()


def rounded(length: int, most: int | None = None) -> int:
    """`length` labels with their padding, `most` in all; None: any number."""
    padded = math.ceil(length / LABELS) * LABELS
    return padded if most is None else min(padded, most)


def _padded(sequences: list[Tensor], length: int) -> Tensor:
    """The sequences padded with zeros to `(B, length, ...)`; longer if one of them is."""
    padded = pad_sequence(sequences, batch_first=True)
    missing = max(0, length - padded.shape[1])
    return torch.nn.functional.pad(padded, (0, 0) * (padded.ndim - 2) + (0, missing))
