"""The LightningModule: training step and validation of a recogniser."""

from __future__ import annotations

import dataclasses

import torch

from asr.audio.augment import SpecAugment, change_speed
from asr.audio.distort import Distortion
from asr.decode.scoring import word_errors
from asr.decode.search import search
from asr.model.speech_model import SpeechModel
from asr.training.base import Training
from asr.training.batches import Batch
from asr.training.config import TrainConfig
from asr.training.loss import Losses, joint_loss, lens_for_ctc
from asr.training.memory import NOTHING, dummy_batch
from asr.training.minimum_wer import expected_word_errors


class SpeechTraining(Training):
    """Trains a `SpeechModel` for `updates` optimiser steps."""

    stack = "model.transformer"

    def __init__(self, config: TrainConfig, model: SpeechModel, updates: int):
        super().__init__(config, updates)
        self.model = model
        self.distortion = Distortion(config.distortion)
        self.spec_augment = SpecAugment(config.spec_augment, model.front_end.hertz)

    def training_step(self, batch: Batch) -> torch.Tensor:
        empty = not len(batch.lens)  # the other processes wait for gradients all the same
        losses = self.losses(dummy_batch(self, NOTHING) if empty else batch)
        tokens = (batch.Y_lens + 1).sum()
        self.add_train(tokens, {name: value for name, value in losses._asdict().items() if value is not None}, empty)
        return self.in_update(losses.total, tokens)

    def total_loss(self, batch: Batch) -> torch.Tensor:
        return self.losses(batch).total

    def losses(self, batch: Batch) -> Losses:
        """The losses of a batch with everything that training adds: speed, distortion, SpecAugment, dropout, CTC from
        intermediate layers, a second view, expected word errors."""
        inputs, lens = batch.inputs, batch.lens
        takes = self.model.front_end.config.takes
        if takes == "sound":
            inputs, lens = change_speed(inputs, lens, batch.speed)
            inputs = self.distortion(inputs, lens)
        X, X_lens = self.model.front_end(inputs, lens)
        Y, Y_lens, loss = batch.Y, batch.Y_lens, self.config.loss
        if loss.consistency:
            X, X_lens, Y, Y_lens = (torch.cat([x, x]) for x in (X, X_lens, Y, Y_lens))
        if takes != "text":
            X = self.spec_augment(X, X_lens)
        transformer = self.model.transformer
        take_lens = lens_for_ctc(transformer, X_lens, Y_lens) if transformer.ctc else None
        output = transformer(X, X_lens, Y, Y_lens, loss.intermediate_ctc)
        losses = joint_loss(output, Y, Y_lens, loss, transformer.config.eos, take_lens)
        if not loss.mwer:
            return losses
        errors = expected_word_errors(self.model, output, Y, Y_lens, loss.nbest) / output.lens.sum()
        return losses._replace(total=losses.total + loss.mwer * errors, word_errors=errors.detach())

    def validation_step(self, batch: Batch) -> None:
        if not len(batch.lens):
            return
        X, X_lens = self.model.front_end(batch.inputs, batch.lens)
        output = self.model.transformer(X, X_lens, batch.Y, batch.Y_lens)
        once = dataclasses.replace(self.config.loss, consistency=0.0)
        losses = joint_loss(output, batch.Y, batch.Y_lens, once, eos=self.model.transformer.config.eos)
        self.add_dev((batch.Y_lens + 1).sum(), losses.total)
        found = search(self.model.transformer, output.memory, output.memory_lens, self.config.validation)
        self.hypotheses += [self.model.tokenizer.decode(best[0].tokens) for best in found]
        self.references += batch.texts

    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self.references: list[str] = []
        self.hypotheses: list[str] = []

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        errors = word_errors(self.references, self.hypotheses)
        counts = torch.tensor([100.0 * errors.edits, errors.total], dtype=torch.double, device=self.device)
        counts = self.trainer.strategy.reduce(counts, reduce_op="sum")
        self.log("dev/wer", torch.where(counts[1] > 0, counts[0] / counts[1], torch.inf).float())
