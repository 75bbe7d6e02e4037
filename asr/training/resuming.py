"""Never losing work: a training that is killed continues in the middle of its epoch, with the batches that were still
to come and the random numbers that they would have had.

Random numbers are a function of seed, epoch, process and batch, so that a checkpoint only has to hold the place.
"""

from __future__ import annotations

import io
import logging
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import Sampler

from asr.files import replacing

logger = logging.getLogger(__name__)

LOOK_EVERY = 50  # batches between two checks that make devices or processes wait for each other


def step_seed(*place: int) -> int:
    """The random seed for `place`: (seed, epoch, ...)."""
    return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_step(device: torch.device, *place: int) -> None:
    """Seeds the generators of the CPU and of `device` for `place`, as `torch.manual_seed` does for every kind of
    device, which takes a millisecond."""
    seed = step_seed(*place)
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A checkpoint that Lightning wrote; tensors are read from the file when they are used. Raises ValueError for an
    incomplete file."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        if getattr(error, "filename", None):  # it could not be opened
            raise
        raise ValueError(f"{path} is not a complete checkpoint: restore the complete file, or move it away") from None


class Resumable(Sampler):
    """The sampler's batches, each with a seed; batches done before the training was resumed are skipped.

    Batches that several processes have at the same time share a seed: played at one speed, they take equally long."""

    def __init__(self, batches: Sampler, seed: int = 0, done: tuple[int, int] = (0, 0)):
        """`done`: an epoch, and how many of its batches are skipped."""
        self.batches = batches
        self.seed, self.done = seed, done
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.batches.set_epoch(epoch)

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        first = self.done[1] if self.done[0] == self.epoch else 0
        for i, batch in islice(enumerate(self.batches), first, None):
            yield batch, step_seed(self.seed, self.epoch, i)


class ResumableData(L.LightningDataModule):
    """Data that keeps its place in the epoch in checkpoints."""

    done = (-1, 0)  # an epoch, and how many of its batches are done
    saved_batching: list[float] | None = None  # what decided the batches when the checkpoint was saved
    earlier_dev_set: list[float] | None = None  # of the checkpoint, until an epoch is scored on the new one
    seed: int

    def resumable(self, batches: Sampler) -> Resumable:
        """The training batches from where the checkpoint left off; without a trainer, in a loop of one's own, all."""
        if self.trainer is None:
            return Resumable(batches, self.seed)
        loop = self.trainer.fit_loop
        epoch = loop.epoch_progress.current.processed
        if self.done[0] == epoch and self.saved_batching != self._batching():
            logger.warning(
                "epoch %d starts anew: its batches are not those of which %d were done", epoch + 1, self.done[1]
            )
            self.done = epoch, 0
            loop.epoch_loop.batch_progress.current.reset()
        resumable = Resumable(batches, self.seed, self.done)
        resumable.set_epoch(epoch)  # Lightning sets it too late for the first epoch after a resume
        return resumable

    def batches_by(self) -> list[float]:
        """What determines the batches of an epoch, in addition to its seed and the number of processes."""
        raise NotImplementedError

    def dev_set(self) -> list[float]:
        """Numbers that tell one dev set from another."""
        raise NotImplementedError

    def _batching(self) -> list[float]:
        return [self.seed, self.trainer.world_size, *self.batches_by()]

    def state_dict(self) -> dict[str, Any]:
        loop = self.trainer.fit_loop
        batches = loop.epoch_loop.batch_progress.current.completed
        return {
            "epoch": loop.epoch_progress.current.ready - 1,
            "batches": batches,
            "by": self._batching(),
            "dev": self.earlier_dev_set or self.dev_set(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done, self.saved_batching = (state["epoch"], state["batches"]), state["by"]
        if state["dev"] != self.dev_set()[: len(state["dev"])]:  # earlier checkpoints hold fewer
            self.earlier_dev_set = state["dev"]


class WholeCheckpoints(TorchCheckpointIO):
    """Writes checkpoints next to their place and then moves them there: whenever a training is killed, the file there
    is complete. Lightning writes them into the folder for temporary files, which may be small, and copies them."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Raises OSError naming the file, and leaves nothing of it, if the disk is full."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(checkpoint, content := io.BytesIO())
        with replacing(path) as unfinished:
            unfinished.write_bytes(content.getbuffer())


class LastCheckpoint(Checkpoint):
    """Saves the state of the training as `last.ckpt`: at the end of each epoch, every `minutes` within it, and when
    SIGTERM or SIGINT (Ctrl-C) ends it. A validation is finished first; a second Ctrl-C does not wait."""

    def __init__(self, folder: Path, minutes: float):
        self.path = folder / "last.ckpt"
        self.minutes = minutes
        self.ending: int | None = None  # the signal that told this process to end

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == TrainerFn.VALIDATING:  # after the fit: there is nothing to save
            trainer._signal_connector._sigterm_notifier_fn = partial(self._end_at_once, trainer)

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.saved = time.monotonic()
        # Lightning's own handler broadcasts from wherever it interrupts: processes that are told at different moments
        # wait for each other forever. And it checks at every batch whether one was told, which waits for the GPU
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._end)  # until Lightning restores the former ones after the fit
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None

    def _end_at_once(self, trainer: L.Trainer, number: int, _: object) -> NoReturn:
        if trainer.strategy.launcher:
            trainer.strategy.launcher.kill(number)  # the processes that this one started
        raise SIGTERMException

    def _end(self, number: int, _: object) -> None:
        if self.ending == number == signal.SIGINT:
            raise KeyboardInterrupt
        if number == signal.SIGINT:
            logger.warning("saving the training first; press Ctrl-C again not to wait for that")
        self.ending = number

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if not batch_idx or batch_idx % trainer.accumulate_grad_batches:
            return  # nothing is new, or there are accumulated gradients, which a checkpoint does not hold
        if trainer.world_size > 1 and batch_idx % (LOOK_EVERY * trainer.accumulate_grad_batches):
            return
        ending = self._anyone(trainer, self.ending is not None)
        if ending or self._anyone(trainer, time.monotonic() - self.saved >= 60 * self.minutes):
            self._save(trainer)
        if ending:
            self._leave()

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._save(trainer)

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if self._anyone(trainer, self.ending is not None):  # not before: the curves of an epoch are drawn after its end
            self._leave()

    on_train_end = on_train_epoch_start

    def _leave(self) -> NoReturn:
        raise KeyboardInterrupt if self.ending == signal.SIGINT else SIGTERMException

    def _anyone(self, trainer: L.Trainer, own: bool) -> bool:
        """Whether `own` is true in any of the processes, which wait for each other."""
        return own if trainer.world_size == 1 else trainer.strategy.reduce_boolean_decision(own, all=False)

    def _save(self, trainer: L.Trainer) -> None:
        trainer.save_checkpoint(self.path)
        self.saved = time.monotonic()
