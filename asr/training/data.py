"""From corpora to batches: duration buckets, speed perturbation, tensors on their way to the device."""

from __future__ import annotations

import logging
import math
import os
import random
import sys
import warnings
from bisect import bisect_left
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from lhotse import CutSet
from lhotse.dataset import DynamicBucketingSampler, SimpleCutSampler
from lhotse.dataset.sampling.base import CutSampler
from lhotse.dataset.sampling.dynamic_bucketing import FixedBucketBatchSizeConstraint
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from asr.audio.reading import SAMPLE_RATE
from asr.corpus import MATRIX_FRAMES_PER_SECOND, Skipped, iterate, open_corpus
from asr.model.speech_model import SpeechModel
from asr.text.normalizer import get_normalizer
from asr.text.tokenizer import Tokenizer
from asr.training.config import DataConfig
from asr.training.resuming import Resumable, ResumableData

logger = logging.getLogger(__name__)

BUCKETS = 20  # leave 5 to 7 % of the frames to padding
LABELS = 8  # labels are padded to multiples of so many


class Bucket(NamedTuple):
    """Of the batches whose utterances are about equally long: seconds to which each is padded, and how many they are.

    All its batches have one shape (and one more for each speed). Kernels are made for a shape and memory is cut for it:
    with batches of ever new shapes a training on a CPU spends a third of its time on both."""

    seconds: float
    utterances: int


def make_buckets(durations: list[float], batch_seconds: float) -> list[Bucket]:
    """At most `BUCKETS`, of equal shares of the sound, from short to long; with little sound fewer, so that each keeps
    about two batches. The batches of a bucket are about equally full."""
    longest = np.sort(durations)
    sound = longest.cumsum()
    count = min(BUCKETS, max(1, int(sound[-1] / batch_seconds / 2)))
    last = np.searchsorted(sound, sound[-1] * np.arange(1, count + 1) / count).clip(max=len(longest) - 1)
    edges = np.unique(longest[last])
    sizes = np.diff(np.searchsorted(longest, edges, side="right"), prepend=0)
    batches = np.ceil(sizes / np.maximum(1, batch_seconds // edges))
    utterances = np.ceil(sizes / batches).astype(int)
    return [Bucket(*bucket) for bucket in zip(edges.tolist(), utterances.tolist(), strict=True)]


class Batch(NamedTuple):
    """B utterances, padded with zeros; none where nothing of the batch could be read."""

    inputs: Tensor  # (B, N) samples, or (B, T, d) matrices
    lens: Tensor  # (B,) in samples or frames
    Y: Tensor  # (B, U)
    Y_lens: Tensor  # (B,)
    texts: list[str]  # normalised
    speed: float  # at which training plays it


class SpeechDataset(Dataset):
    """A batch of cuts and its seed to a `Batch`, padded as its bucket says; what cannot be read is left out.

    The speed is that of the whole batch: drawn for each utterance it would undo what the buckets save, 17 % of AN4's
    frames were padding then."""

    def __init__(self, tokenizer: Tokenizer, speeds: list[float], buckets: list[Bucket], longest: int | None = None):
        """`longest`: labels that the decoder has positions for; None: any number."""
        self.tokenizer = tokenizer
        self.longest = longest or sys.maxsize
        self.speeds = speeds
        self.seconds = [bucket.seconds for bucket in buckets]

    def __getitem__(self, batch: tuple[CutSet, int]) -> Batch:
        cuts, seed = batch
        inputs, texts = [], []
        speed = random.Random(seed).choice(self.speeds)
        for cut, sound in iterate(cuts):
            inputs.append(torch.from_numpy(sound))
            texts.append(cut.supervisions[0].text)
        if not inputs:
            nothing = torch.zeros(0, dtype=torch.int64)
            return Batch(torch.zeros(0, 1), nothing, nothing[:, None], nothing, [], speed)
        labels = [torch.tensor(self.tokenizer.encode(text)) for text in texts]
        most = max(map(len, labels))
        seconds = self.seconds[bisect_left(self.seconds, max(cut.duration for cut in cuts))]
        rate = SAMPLE_RATE if inputs[0].ndim == 1 else MATRIX_FRAMES_PER_SECOND
        return Batch(
            _padded(inputs, math.ceil(seconds * rate)),
            torch.tensor([len(x) for x in inputs]),
            _padded(labels, min(math.ceil(most / LABELS) * LABELS, self.longest)),
            torch.tensor([len(y) for y in labels]),
            texts,
            speed,
        )


class SpeechData(ResumableData):
    """The corpora of a training, normalised, checked and batched."""

    def __init__(self, config: DataConfig, seed: int):
        super().__init__()
        self.config = config
        self.seed = seed
        normalize = get_normalizer(config.normalizer)
        self.train_cuts = _normalized(open_corpus(config.train), normalize)
        self.dev_cuts = _normalized(open_corpus(config.dev), normalize)

    def texts(self) -> list[str]:
        """The normalised transcripts of the training set."""
        return [cut.supervisions[0].text for cut in self.train_cuts]

    def fit_to(self, model: SpeechModel) -> None:
        """Takes the model's tokenizer, and leaves out of training, by name, what the model cannot be trained on."""
        self.tokenizer = model.tokenizer
        self.window = model.front_end.config.pad_seconds
        self.longest = model.transformer.config.longest_transcript
        self.train_cuts = _trainable(self.train_cuts, self.config, model)
        self.dev_cuts = _writable(self.dev_cuts, model)
        self.buckets = make_buckets(self._heard(self.train_cuts), self.config.batch_seconds)

    def _heard(self, cuts: CutSet) -> list[float]:
        """The seconds of each cut that the encoder hears: some front ends pad to a window."""
        return [max(cut.duration, self.window) for cut in cuts]

    @property
    def train_seconds(self) -> float:
        return sum(cut.duration for cut in self.train_cuts)

    def train_dataloader(self) -> DataLoader:
        return self._loader(self.resumable(self._train_sampler(), self.seed), self.config.speeds, self.buckets)

    def batches_per_epoch(self) -> int:
        """How many batches the first epoch has, over all processes; later epochs differ by a few."""
        return sum(1 for _ in self._train_sampler(world_size=1, rank=0))

    def _train_sampler(self, **ranks: int) -> CutSampler:
        seconds, utterances = map(list, zip(*self.buckets, strict=True))
        if len(seconds) == 1:
            return SimpleCutSampler(self.train_cuts, max_cuts=utterances[0], shuffle=True, seed=self.seed, **ranks)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="You are using DynamicBucketingSampler with an eagerly read")
            return DynamicBucketingSampler(
                self.train_cuts,
                constraint=FixedBucketBatchSizeConstraint(seconds, utterances),
                duration_bins=seconds[:-1],
                shuffle=True,
                seed=self.seed,
                **ranks,
            )

    def val_dataloader(self) -> DataLoader:
        longest_first = self.dev_cuts.sort_by_duration()
        heard = self._heard(longest_first)
        limit = max(self.config.batch_seconds, heard[0])
        most = int(limit // self.window) if self.window else None
        sampler = SimpleCutSampler(longest_first, max_duration=limit, max_cuts=most)
        return self._loader(Resumable(sampler), [1.0], make_buckets(heard, limit))

    def _loader(self, batches: Resumable, speeds: list[float], buckets: list[Bucket]) -> DataLoader:
        workers = self.config.workers if self.config.workers >= 0 else min(8, max(1, (os.cpu_count() or 1) - 1))
        return DataLoader(
            SpeechDataset(self.tokenizer, speeds, buckets, self.longest),
            sampler=batches,
            batch_size=None,
            num_workers=workers,
            # a worker forked anew each epoch would share the trainer's pages, each of which is then copied when written
            persistent_workers=workers > 0,
            pin_memory=torch.cuda.is_available(),
        )


def _padded(sequences: list[Tensor], length: int) -> Tensor:
    """`(B, length, ...)`, with zeros; longer where a sequence is."""
    padded = pad_sequence(sequences, batch_first=True)
    missing = max(0, length - padded.shape[1])
    return torch.nn.functional.pad(padded, (0, 0) * (padded.ndim - 2) + (0, missing))


def _normalized(cuts: CutSet, normalize) -> CutSet:
    skipped, kept = Skipped("transcripts"), []
    for cut in cuts:
        skipped.total += 1
        text = normalize(cut.supervisions[0].text or "")
        if not text:
            skipped.add(cut.id, "its transcript is empty after normalisation")
            continue
        cut.supervisions[0].text = text
        kept.append(cut)
    skipped.report()
    if not kept:
        raise ValueError("no utterance has a transcript")
    return CutSet.from_cuts(kept)


def _trainable(cuts: CutSet, config: DataConfig, model: SpeechModel) -> CutSet:
    """The cuts within the limits, whose transcript the decoder has positions for, and which CTC (if it is there) can
    align at the highest speed: the memory must be at least as long as the labels and one blank for each repetition."""
    skipped, kept = Skipped("training set"), []
    for cut in cuts:
        skipped.total += 1
        if not config.min_seconds <= cut.duration <= config.max_seconds:
            skipped.add(cut.id, f"{cut.duration:.1f} s is outside data.min_seconds to data.max_seconds")
            continue
        labels = model.tokenizer.encode(cut.supervisions[0].text)
        if reason := _too_long(labels, model):
            skipped.add(cut.id, reason)
            continue
        needed = len(labels) + sum(a == b for a, b in pairwise(labels))
        if cut.recording is None:
            frames = torch.tensor(round(cut.duration * MATRIX_FRAMES_PER_SECOND))
        else:
            frames = model.front_end.output_lens(torch.tensor(int(cut.duration / max(config.speeds) * SAMPLE_RATE)))
        memory = int(model.transformer.encoder.subsampling.output_lens(frames))
        if model.transformer.ctc and memory < needed:
            skipped.add(cut.id, f"{memory} encoder frames are too few for {needed} labels")
            continue
        kept.append(cut)
    skipped.report()
    if not kept:
        raise ValueError("data.train: no utterance is left to train on")
    return CutSet.from_cuts(kept)


def _writable(cuts: CutSet, model: SpeechModel) -> CutSet:
    """The dev cuts whose transcript the decoder has positions for."""
    if model.transformer.config.longest_transcript is None:
        return cuts
    skipped, kept = Skipped("dev set"), []
    for cut in cuts:
        skipped.total += 1
        if reason := _too_long(model.tokenizer.encode(cut.supervisions[0].text), model):
            skipped.add(cut.id, reason)
        else:
            kept.append(cut)
    skipped.report()
    if not kept:
        raise ValueError("data.dev: every transcript is too long for the decoder")
    return CutSet.from_cuts(kept)


def _too_long(labels: list[int], model: SpeechModel) -> str | None:
    """Why the decoder cannot write so many labels; None: it can."""
    longest = model.transformer.config.longest_transcript
    if longest is None or len(labels) <= longest:
        return None
    return f"{len(labels)} labels are more than the {longest} that the decoder has positions for"
