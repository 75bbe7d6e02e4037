"""What a training shows: one line per epoch and, in TensorBoard, sample transcripts and a picture of attention."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping

from asr.training.base import Training
from asr.training.batches import Batch
from asr.training.module import SpeechTraining
from asr.training.resuming import ResumableData

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

SHOWN = 5  # sample transcripts


class EpochTimer(L.Callback):
    """Times each epoch for its line; a resumed epoch is timed from where it was resumed. Logs the losses of an epoch
    before its line."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.begin(trainer, module, trainer.fit_loop.epoch_loop.batch_progress.current.completed)

    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.begin(trainer, module, 0)

    def begin(self, trainer: L.Trainer, module: L.LightningModule, first: int) -> None:
        """Starts timing an epoch at its batch `first`, which is above 0 if the epoch is resumed."""
        self.started, self.first = time.monotonic(), first

    def on_train_epoch_end(self, trainer: L.Trainer, module: Training) -> None:
        module.log_train_means()

    def took_and_left(self, trainer: L.Trainer) -> tuple[float, float]:
        """Seconds for the whole of the epoch that is ending, and minutes that the remaining epochs will take."""
        batches = trainer.fit_loop.epoch_loop.batch_progress.current.completed
        took = (time.monotonic() - self.started) * max(1, batches) / max(1, batches - self.first)
        return took, took * (trainer.max_epochs - trainer.current_epoch - 1) / 60


class EpochLine(EpochTimer):
    """One line per epoch, and curves in TensorBoard: losses, dev WER, seconds of audio per second, the share of padding
    in the frames and of waiting for data in the time."""

    def __init__(self, sound_seconds: float, shown: dict[str, str]):
        """`shown`: further validation figures, each with its format."""
        self.sound_seconds = sound_seconds
        self.shown = shown

    def begin(self, trainer: L.Trainer, module: L.LightningModule, first: int) -> None:
        super().begin(trainer, module, first)
        self.waited_before = trainer.train_dataloader.waited
        self.trained = 0.0  # seconds, validation not counted
        self.frames, self.real_frames = 0, torch.zeros((), device=module.device)  # read once per epoch
        self.utterances = self.unread = 0

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Batch, batch_idx: int):
        self.frames += batch.inputs.shape[0] * batch.inputs.shape[1]
        self.real_frames += batch.lens.sum()
        self.utterances += len(batch.lens) + batch.unread
        self.unread += batch.unread

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs, batch: Batch, batch_idx: int):
        self.trained = time.monotonic() - self.started

    def on_train_epoch_end(self, trainer: L.Trainer, module: Training) -> None:
        super().on_train_epoch_end(trainer, module)
        self._report_unread(trainer, module)
        took, left = self.took_and_left(trainer)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        validated = (trainer.current_epoch + 1) % trainer.check_val_every_n_epoch == 0
        since = " since it was resumed" if self.first else ""
        formats = {"train/total_epoch": f"loss {{:.3f}}{since}"} | (
            {"dev/loss": "dev loss {:.3f}"} | self.shown if validated else {}
        )
        shown = [text.format(metrics[name]) for name, text in formats.items() if name in metrics]
        speed = self.sound_seconds / took
        padding = 100 * (1 - float(self.real_frames) / max(1, self.frames))
        waited = trainer.train_dataloader.waited - self.waited_before
        waiting = 100 * waited / max(1e-9, self.trained)
        module.log_dict({"train/sound_a_second": speed, "train/padding": padding, "train/waiting": waiting})
        epoch = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"
        cost = f"{padding:.1f} % padding, {waiting:.1f} % waiting for data, {left:.1f} min left"
        logger.info("%s: %s; %.0f s (%.0f s of audio per second, %s)", epoch, ", ".join(shown), took, speed, cost)

    def _report_unread(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Reports how many utterances no process could read. Raises ValueError if that is all of an epoch."""
        counts = torch.tensor([self.unread, self.utterances], device=module.device)
        unread, utterances = trainer.strategy.reduce(counts, reduce_op="sum").tolist()
        if unread and unread == utterances and not self.first:
            raise ValueError("no utterance of the training set can be read")
        if unread and trainer.is_global_zero:
            what = f"epoch {trainer.current_epoch + 1}: {unread:,} of {utterances:,} utterances could not be read"
            logger.warning("%s, and were left out", what)


class Patience(EarlyStopping):
    """Ends a training whose dev WER no longer falls. If it is resumed, it ends at once unless `patience` was raised or
    the dev set changed."""

    def __init__(self, validations: int, data: ResumableData):
        # without a dev utterance that could be read the WER is infinite: no better, and nothing worse
        super().__init__("dev/wer", patience=validations, check_finite=False)
        self.data = data

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.should_stop = self.wait_count >= self.patience

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not self.data.earlier_dev_set:
            super().load_state_dict(state_dict | {"patience": self.patience})


class Samples(L.Callback):
    """Shows sample transcripts and the last decoder layer's attention on the first dev utterance in TensorBoard."""

    batch = None

    def on_validation_batch_end(self, trainer, module: SpeechTraining, outputs, batch, batch_idx, dataloader_idx=0):
        if self.batch is None and len(batch.lens):
            self.batch = batch

    def on_validation_epoch_end(self, trainer: L.Trainer, module: SpeechTraining) -> None:
        if not trainer.is_global_zero:
            return
        board = trainer.logger.experiment
        pairs = list(zip(module.references, module.hypotheses, strict=True))[-SHOWN:]
        text = "\n\n".join(f"**said** {said}  \n**heard** {heard}" for said, heard in pairs)
        board.add_text("dev/transcripts", text, trainer.global_step)
        if self.batch:
            board.add_figure("dev/attention", drawn(self._attention(module)), trainer.global_step)

    @torch.inference_mode()
    def _attention(self, module: SpeechTraining) -> torch.Tensor:
        """The mean weights `(tokens, encoder frames)` of the last layer's heads."""
        model, batch = module.model, self.batch
        X, X_lens = model.front_end(batch.inputs[:1, : batch.lens[0]], batch.lens[:1])
        weights: list[torch.Tensor] = []
        Y = batch.Y[:1, : batch.Y_lens[0]]
        decoder = model.transformer.decoder
        memory, memory_lens = model.transformer.encoder(X, X_lens)
        decoder(decoder.prompted(Y), memory, memory_lens, weights)
        return weights[-1][0].mean(dim=0).float().cpu()


def drawn(weights: torch.Tensor) -> Figure:
    """A picture of attention weights `(tokens, encoder frames)`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4))
    figure.subplots_adjust(left=0.07, right=0.99, bottom=0.12, top=0.97)  # a layout would draw it twice
    axes = figure.add_subplot(xlabel="encoder frame", ylabel="token")  # the tokens are in the transcripts
    axes.imshow(weights, aspect="auto", origin="lower")
    return figure
