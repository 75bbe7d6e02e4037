"""The largest batches first: what does not fit into the device's memory is known before the first update, not in the
third epoch. It also lets the allocator reserve once what every later batch is cut from."""

from __future__ import annotations

from typing import NamedTuple

import lightning as L
import torch
from lhotse import CutSet

from asr.audio.reading import SAMPLE_RATE
from asr.corpus import MATRIX_FRAMES_PER_SECOND
from asr.text.tokenizer import SPECIALS
from asr.training.config import DataConfig
from asr.training.data import Batch, SpeechData
from asr.training.module import SpeechTraining

SIZES = 20  # of utterances, from short to long: about as many as there are buckets


class Size(NamedTuple):
    """Of a batch: utterances, seconds of each as it is played, labels of each."""

    utterances: int
    seconds: float
    labels: int


def largest_sizes(cuts: CutSet, labels: list[int], config: DataConfig) -> list[Size]:
    """The largest batch of each of `SIZES` durations, at the slowest speed; `labels` are those of each cut."""
    longest = sorted((cut.duration, count) for cut, count in zip(cuts, labels, strict=True))
    step = max(1, -(-len(longest) // SIZES))
    groups = [longest[first : first + step] for first in range(0, len(longest), step)]
    return [
        Size(
            max(1, int(config.batch_seconds / group[-1][0])),
            group[-1][0] / min(config.speeds),
            max(count for _, count in group),
        )
        for group in reversed(groups)
    ]


def try_batch(module: SpeechTraining, size: Size) -> None:
    """Losses and gradients of a batch of noise; nothing of it is kept. Raises ValueError where memory is too small."""
    front_end, vocabulary = module.model.front_end, len(module.model.tokenizer)
    if front_end.config.kind == "matrix":
        shape = (size.utterances, round(size.seconds * MATRIX_FRAMES_PER_SECOND), front_end.config.dim)
    else:
        shape = (size.utterances, round(size.seconds * SAMPLE_RATE))
    device = module.device
    lens = torch.full((size.utterances,), shape[1], device=device)
    Y = torch.randint(len(SPECIALS), vocabulary, (size.utterances, size.labels), device=device)
    batch = Batch(0.1 * torch.randn(shape, device=device), lens, Y, torch.full_like(lens, size.labels), [])
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        with module.trainer.precision_plugin.train_step_context():
            total = module.losses(batch).total
        torch.autograd.grad(total, trained, allow_unused=True)  # past the hooks by which processes exchange gradients
    except torch.OutOfMemoryError:
        raise ValueError(
            f"a batch of {size.utterances} utterances of {size.seconds:.1f} s does not fit into the memory of {device}:"
            " lower data.batch_seconds (data.global_batch_seconds keeps the update as large as it is)"
        ) from None


class LargestFirst(L.Callback):
    """Tries the largest batches before the first update, on devices that have a memory of their own."""

    def __init__(self, data: SpeechData):
        self.data = data

    def on_train_start(self, trainer: L.Trainer, module: SpeechTraining) -> None:
        if module.device.type == "cpu":
            return
        labels = [len(module.model.tokenizer.encode(text)) for text in self.data.texts()]
        for size in largest_sizes(self.data.train_cuts, labels, self.data.config):
            try_batch(module, size)
