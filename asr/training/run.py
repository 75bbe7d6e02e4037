"""A training from beginning to end: data, tokenizer, statistics, fit, averaging, export."""

from __future__ import annotations

import importlib.util
import logging
import math
import random
import sys
from dataclasses import asdict
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    WeightAveraging,
)
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from torch.optim.swa_utils import get_ema_multi_avg_fn

from asr.audio.features import RunningStatistics
from asr.corpus import iterate
from asr.decode.precision import best_precision
from asr.decode.search import check_options
from asr.model.speech_model import SpeechModel
from asr.text.loading import load_tokenizer
from asr.training.averaging import average_checkpoints, interpolate
from asr.training.building import adapt_model, build_model, build_tokenizer
from asr.training.callbacks import EpochLine, Samples
from asr.training.config import LMTrainConfig, TrainConfig
from asr.training.data import SpeechData
from asr.training.memory import FreedMemory, LargestFirst
from asr.training.module import SpeechTraining
from asr.training.report import write_report
from asr.training.resuming import Latest

logger = logging.getLogger(__name__)

STATISTICS_SECONDS = 3600.0  # of sound from which mean and variance are taken


def train(config: TrainConfig) -> tuple[Path, float]:
    """Trains, averages the best checkpoints and exports the model: its folder, and its WER on dev in percent.

    Raises ValueError for data or options that cannot be used, FileExistsError where `config.out` holds a training that
    is not to be resumed."""
    out = Path(config.out)
    last = begin(config)
    data = SpeechData(config.data, config.seed)
    origin = SpeechModel.load(config.init_from) if config.init_from else None
    if last:
        tokenizer = load_tokenizer(out)
    elif origin and not config.new_tokenizer:
        tokenizer = origin.tokenizer
    else:
        tokenizer = build_tokenizer(config.tokenizer, data.texts())
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(out)
    model = adapt_model(origin, config, tokenizer) if origin else build_model(config, tokenizer)
    check_options(model.transformer, config.validation)
    data.fit_to(model)
    trainer, updates = _trainer(config, data, out)
    if not last and not origin:
        model.front_end.set_statistics(*_statistics(model, data))
    module = SpeechTraining(config, model, updates)
    hours, parameters = data.train_seconds / 3600, sum(p.numel() for p in model.parameters()) / 1e6
    logger.info(
        "%.2f h of speech in %d utterances, %.1f M parameters, %s, %s updates",
        *(hours, len(data.train_cuts), parameters, trainer.precision, updates),
    )
    trainer.fit(module, data, ckpt_path=last, weights_only=True)
    best = _best_checkpoints(out, config.average)
    weights = average_checkpoints(best)
    if origin and config.origin_share:
        weights = interpolate(weights, origin.state_dict(), config.origin_share)
    model.load_state_dict(weights)
    # the running mean would put itself in the place of what is to be validated
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, WeightAveraging)]
    wer = trainer.validate(module, data, verbose=False)[0]["dev/wer"]
    folder = out / "model"
    summary = f"dev WER {wer:.2f} % (average of {len(best)} checkpoints)"
    if trainer.is_global_zero:
        model.save(folder, getattr(torch, config.export))
        write_report(out, f"{summary}; {hours:.2f} h of speech, {parameters:.1f} M parameters", asdict(config))
    logger.info("%s; the model is in %s, the curves in %s", summary, folder, out / "report.html")
    return folder, wer


def begin(config: TrainConfig | LMTrainConfig) -> Path | None:
    """Seeds every generator; the checkpoint from which the training in `config.out` goes on, None at its start.

    Raises FileExistsError where `config.out` holds a training that is not to be resumed."""
    last = Path(config.out) / "checkpoints" / "last.ckpt"
    if last.exists() and not config.resume:
        raise FileExistsError(
            f"{config.out} holds a training already: resume=true goes on with it, out=... starts another"
        )
    L.seed_everything(config.seed, workers=True, verbose=False)
    return last if last.exists() else None


@torch.inference_mode()
def _statistics(model: SpeechModel, data: SpeechData) -> tuple[torch.Tensor, torch.Tensor]:
    statistics = RunningStatistics(model.front_end.config)
    cuts = data.train_cuts.shuffle(rng=random.Random(data.seed))
    seconds = 0.0
    for cut, sound in iterate(cuts):
        sound = torch.from_numpy(sound)[None]
        statistics.update(*model.front_end.extract(sound, torch.tensor([sound.shape[1]])))
        seconds += cut.duration
        if seconds > STATISTICS_SECONDS:
            break
    return statistics.result()


def _trainer(config: TrainConfig, data: SpeechData, out: Path) -> tuple[L.Trainer, int]:
    """The Lightning trainer, and the number of updates it will make (about: batches depend on the shuffle)."""
    on_terminal = sys.stderr.isatty()
    best = ModelCheckpoint(
        out / "checkpoints",
        filename="{epoch:03d}-{dev/wer:.2f}",
        auto_insert_metric_name=False,
        monitor="dev/wer",
        save_top_k=config.average,
    )
    latest = Latest(out / "checkpoints", config.save_minutes)
    shown = [EpochLine(data.train_seconds), Samples(), LearningRateMonitor("step")]
    callbacks = [FreedMemory(), LargestFirst(data), best, latest, *shown]
    if config.ema:
        callbacks.append(WeightAveraging(multi_avg_fn=get_ema_multi_avg_fn(config.ema)))
    if config.patience:
        callbacks.append(EarlyStopping("dev/wer", patience=config.patience))
    if on_terminal:
        callbacks.append(RichProgressBar())
    trainer = L.Trainer(
        max_epochs=config.epochs,
        check_val_every_n_epoch=config.validate_every,
        devices=config.devices or "auto",
        num_nodes=config.nodes,
        strategy=config.strategy,
        precision=lightning_precision(config.precision),
        callbacks=callbacks,
        logger=_loggers(config, out),
        use_distributed_sampler=False,
        enable_progress_bar=on_terminal,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
    )
    devices = trainer.world_size
    accumulate = max(1, round(config.data.global_batch_seconds / (config.data.batch_seconds * devices)))
    trainer.accumulate_grad_batches = accumulate
    return trainer, config.epochs * math.ceil(data.batches_per_epoch() / devices / accumulate)


def _loggers(config: TrainConfig, out: Path) -> list[Logger]:
    """TensorBoard's comes first: the callbacks draw into it."""
    board = TensorBoardLogger(out, name="tensorboard", version="")
    if not config.wandb:
        return [board]
    if importlib.util.find_spec("wandb") is None:
        raise ValueError("wandb=... needs the package: pip install wandb")
    # one folder is one run, however often it is resumed
    name = str(out).strip("/").replace("/", "-")
    return [board, WandbLogger(name, out, version=name, project=config.wandb, resume="allow")]


def _best_checkpoints(out: Path, count: int) -> list[Path]:
    """By the dev WER in their names: Lightning forgets which were best when the folder is moved."""
    return sorted((out / "checkpoints").glob("[0-9]*-*.ckpt"), key=lambda path: float(path.stem.split("-")[1]))[:count]


def lightning_precision(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return "bf16-mixed" if best_precision(device) == "bfloat16" else "32-true"
