"""Pre-training from start to finish: audio, masked prediction, export of the encoder."""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import asdict, replace
from pathlib import Path

import torch

from asr.audio.augment import change_speed
from asr.model.best_rq import MaskedPrediction, Prediction
from asr.model.encoder_model import EncoderModel
from asr.training.averaging import BestCheckpoints, average_checkpoints, best_checkpoints
from asr.training.base import Training
from asr.training.batches import Batch
from asr.training.callbacks import EpochLine
from asr.training.config import PretrainConfig
from asr.training.data import SoundData
from asr.training.memory import NOTHING, dummy_batch
from asr.training.report import write_report
from asr.training.resuming import seed_step
from asr.training.trainer import begin, device_count, extent, new_trainer, set_statistics

logger = logging.getLogger(__name__)


class Pretraining(Training):
    """Trains the encoder of an `EncoderModel` for `updates` optimiser steps."""

    stack = "masked_prediction"
    dev_means = ("dev/loss", "dev/accuracy")

    def __init__(self, config: PretrainConfig, model: EncoderModel, updates: int):
        super().__init__(config, updates)
        self.model = model
        self.masked_prediction = MaskedPrediction(model.encoder, config.features.dim, config.masked_prediction)

    def training_step(self, batch: Batch) -> torch.Tensor:
        empty = not len(batch.lens)  # the other processes wait for gradients all the same
        found = self._predict(dummy_batch(self, NOTHING) if empty else batch)
        frames = torch.zeros_like(found.frames) if empty else found.frames
        total = self._total(found)
        self.add_train(frames, {"total": total, "masked": found.masked_loss}, empty)
        return self.in_update(total, frames)

    def total_loss(self, batch: Batch) -> torch.Tensor:
        return self._total(self._predict(batch))

    def _total(self, found: Prediction) -> torch.Tensor:
        return found.masked_loss + self.config.masked_prediction.visible_weight * found.visible_loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if not len(batch.lens):
            return
        seed_step(self.device, self.seed, 0, self.global_rank, batch_idx)  # the same masks each time
        found = self._predict(batch)
        self.add_dev(found.frames, found.masked_loss, 100 * found.accuracy)

    def _predict(self, batch: Batch) -> Prediction:
        inputs, lens = batch.inputs, batch.lens
        if self.model.front_end.config.takes == "sound":
            inputs, lens = change_speed(inputs, lens, batch.speed)
        return self.masked_prediction(*self.model.front_end(inputs, lens))


def pretrain(config: PretrainConfig) -> tuple[Path, float]:
    """Trains, and exports the encoder of the best epoch. Returns its folder and its dev loss, in nats per code of a
    masked frame.

    Raises ValueError for data or options that cannot be used, FileExistsError if `config.out` holds a training that is
    not to be resumed."""
    out = Path(config.out)
    last = begin(config)
    data = SoundData(config.data, config.seed, device_count(config))
    model = EncoderModel(config.features, replace(config.model, input_dim=config.features.dim))
    data.fit_to(model.front_end, model.encoder)
    best = BestCheckpoints(data, out, "dev/loss", 4)
    line = EpochLine(data.train_seconds, {"dev/accuracy": "dev accuracy {:.1f} %"})
    trainer, updates = new_trainer(config, data, model, [best, line])
    if not last:
        set_statistics(model.front_end, data)
    module = Pretraining(config, deepcopy(model), updates)
    trainer.fit(module, data, ckpt_path=last, weights_only=True)
    module = Pretraining(config, model, updates)
    module.load_state_dict(average_checkpoints(best_checkpoints(out)[:1], prefix=""))
    figures = trainer.validate(module, data, verbose=False)[0]
    folder = out / "model"
    summary = f"dev loss {figures['dev/loss']:.3f} a code, {figures['dev/accuracy']:.1f} % of the codes right"
    if trainer.is_global_zero:
        model.save(folder, config.export)
        write_report(out, f"{summary}; {extent(data, model)}", asdict(config))
    logger.info("%s; the encoder is in %s, the curves in %s", summary, folder, out / "report.html")
    return folder, figures["dev/loss"]
