"""Memory management in training.

On a GPU the largest batches come first: what does not fit shows before the first update, not in the third epoch, and
the allocator reserves once what every later batch is cut from. On a CPU freed blocks are kept for the next step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import lightning as L
import numpy as np
import torch

from asr.audio.reading import SAMPLE_RATE, STEPS_PER_SECOND
from asr.heap import keep_freed_blocks, return_freed_blocks
from asr.text.tokenizer import SPECIALS
from asr.training.batches import Batch, rounded
from asr.training.data import SoundData

TRIM_EVERY = 200  # batches


class Size(NamedTuple):
    """The size of a batch: its utterances, the seconds of each as it is played (a matrix's frame or a text's token is a
    hundredth), the labels of each."""

    utterances: int
    seconds: float
    labels: int


NOTHING = Size(utterances=1, seconds=1.0, labels=1)  # for a process whose batch could not be read while others train


def largest_sizes(data: SoundData) -> list[Size]:
    """The batch size of each bucket, from long to short, at the slowest speed and with the most labels that occur up to
    its length, padded; texts, whose buckets go by characters, have the most tokens that occur."""
    encode = data.tokenizer.encode if data.tokenizer else lambda text: []
    durations = np.array([cut.duration for cut in data.train_cuts])
    labels = np.array([len(encode(cut.supervisions[0].text)) for cut in data.train_cuts])
    sources = np.array([len(encode((cut.custom or {}).get("source", ""))) for cut in data.train_cuts])
    sizes = []
    for bucket in reversed(data.buckets):
        inside = durations <= bucket.seconds
        tokens = rounded(sources[inside].max(), data.most_text_tokens)
        if tokens:
            seconds = tokens / STEPS_PER_SECOND
        elif durations[inside].max() <= data.window * min(data.speeds):
            seconds = data.window
        else:
            seconds = bucket.seconds / min(data.speeds)
        sizes.append(Size(bucket.utterances, seconds, rounded(labels[inside].max(), data.most_labels)))
    return sizes


def dummy_batch(module: L.LightningModule, size: Size) -> Batch:
    """A batch of noise and random labels `(B, U)`, for a module whose `model` has a front end and may have tokens."""
    front_end, tokens = module.model.front_end, len(getattr(module.model, "tokenizer", ()))
    takes, device = front_end.config.takes, module.device
    steps = round(size.seconds * (SAMPLE_RATE if takes == "sound" else STEPS_PER_SECOND))
    encoder = getattr(module.model, "transformer", module.model).encoder
    frames = int(encoder.subsampling.output_lens(front_end.output_lens(torch.tensor(steps))))
    if encoder.positions.kind == "learned" and frames > encoder.config.max_positions:
        steps = steps * encoder.config.max_positions // frames
    shape = (size.utterances, steps, *([front_end.config.dim] if takes == "matrix" else []))
    noise = 0.1 * torch.randn(shape, device=device)
    lens = torch.full((size.utterances,), shape[1], device=device)
    Y = torch.randint(len(SPECIALS), max(tokens, len(SPECIALS) + 1), (size.utterances, size.labels), device=device)
    return Batch(noise.long() if takes == "text" else noise, lens, Y, torch.full_like(lens, size.labels), [], 1.0)


def try_batch(module: L.LightningModule, size: Size) -> None:
    """Computes loss and gradients of a batch of noise and discards them. The module needs a `total_loss(batch)`. Raises
    ValueError if memory is too small."""
    try:
        with module.trainer.precision_plugin.train_step_context():
            total = module.total_loss(dummy_batch(module, size))
        if module.sharded:  # the gradients of shares come only through hooks
            total.backward()
            module.zero_grad()
        else:
            trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
            torch.autograd.grad(total, trained, allow_unused=True)  # without the hooks by which processes exchange them
    except torch.OutOfMemoryError:
        raise ValueError(
            f"a batch of {size.utterances} utterances of {size.seconds:.1f} s does not fit into the memory of"
            f" {module.device}: lower data.batch_seconds (data.global_batch_seconds keeps the update as large as it is)"
        ) from None


class LargestFirst(L.Callback):
    """Tries the largest batches before the first update, on devices with their own memory, leaving room for the
    optimiser's two moments, which the first update allocates."""

    def __init__(self, data: SoundData):
        self.data = data

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if module.device.type == "cpu":
            return
        begun = any(optimizer.state for optimizer in trainer.optimizers)
        room = [] if begun else [torch.empty_like(p) for p in module.parameters() if p.requires_grad for _ in range(2)]
        for size in largest_sizes(self.data):
            try_batch(module, size)
        del room


class FreedMemory(L.Callback):
    """Keeps freed blocks on a CPU. Now and then all free memory is returned nevertheless: batches of many sizes leave
    holes, and the process would grow for hours."""

    def on_fit_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if module.device.type == "cpu":
            keep_freed_blocks()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx % TRIM_EVERY == TRIM_EVERY - 1 and module.device.type == "cpu":
            return_freed_blocks()
