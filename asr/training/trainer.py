"""What every training here begins with: its seed, the Lightning trainer, its loggers, the features' statistics."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.strategies import Strategy

from asr.audio.features import FrontEnd, RunningStatistics
from asr.corpus import iterate
from asr.decode.precision import best_precision
from asr.heap import keep_kernels
from asr.training.config import LMTrainConfig, PretrainConfig, TrainConfig
from asr.training.data import SoundData
from asr.training.sharding import fully_sharded

STATISTICS_SECONDS = 3600.0  # of sound from which mean and variance are taken
KERNELS = 16384  # about 50 for each of the shapes that batches have: buckets times speeds


def begin(config: TrainConfig | PretrainConfig | LMTrainConfig) -> Path | None:
    """Seeds every generator, and has kernels kept; the checkpoint from which the training in `config.out` goes on, None
    at its start.

    Raises FileExistsError where `config.out` holds a training that is not to be resumed, ValueError where it was begun
    sharded and is to go on otherwise, or the reverse."""
    last = Path(config.out) / "checkpoints" / "last.ckpt"
    if last.exists() and not config.resume:
        raise FileExistsError(
            f"{config.out} holds a training already: resume=true goes on with it, out=... starts another"
        )
    if last.exists():
        saved = torch.load(last, weights_only=True, mmap=True)["config"]
        if (saved.get("strategy") == "fsdp") != (getattr(config, "strategy", "") == "fsdp"):
            raise ValueError(
                f"{config.out} was begun with strategy={saved['strategy']}, and goes on so: fsdp keeps the optimiser's"
                " state in another order"
            )
    if not torch.cuda.is_available():
        keep_kernels(KERNELS)  # without those of all shapes a training in bfloat16 takes a third longer
    L.seed_everything(config.seed, workers=True, verbose=False)
    return last if last.exists() else None


def new_trainer(
    config: TrainConfig | PretrainConfig, data: SoundData, callbacks: list[L.Callback]
) -> tuple[L.Trainer, int]:
    """The Lightning trainer, and the number of updates it will make (about: batches depend on the shuffle)."""
    on_terminal = sys.stderr.isatty()
    trainer = L.Trainer(
        max_epochs=config.epochs,
        check_val_every_n_epoch=config.validate_every,
        devices=config.devices or "auto",
        num_nodes=config.nodes,
        strategy=_strategy(config),
        precision=lightning_precision(config.precision),
        callbacks=[*callbacks, *([RichProgressBar()] if on_terminal else [])],
        logger=_loggers(config.wandb, Path(config.out)),
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


def _strategy(config: TrainConfig | PretrainConfig) -> str | Strategy:
    if config.strategy != "fsdp":
        return config.strategy
    return fully_sharded(config.nodes * (config.devices or max(1, torch.cuda.device_count())))


def extent(data: SoundData, model: torch.nn.Module) -> str:
    """How large a training is, in words."""
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    hours, count = data.train_seconds / 3600, len(data.train_cuts)
    return f"{hours:.2f} h of sound in {count} utterances, {parameters:.1f} M parameters"


@torch.inference_mode()
def set_statistics(front_end: FrontEnd, data: SoundData) -> None:
    """Takes the features' mean and deviation from some of the training set. Raises ValueError where none of it can be
    read."""
    statistics = RunningStatistics(front_end.config)
    cuts = data.train_cuts.shuffle(rng=random.Random(data.seed))
    seconds = 0.0
    for cut, sound in iterate(cuts):
        sound = torch.from_numpy(sound)[None]
        statistics.update(*front_end.extract(sound, torch.tensor([sound.shape[1]])))
        seconds += cut.duration
        if seconds > STATISTICS_SECONDS:
            break
    if not seconds:
        raise ValueError("no utterance of the training set can be read")
    front_end.set_statistics(*statistics.result())


def lightning_precision(wanted: str) -> str:
    if wanted != "auto":
        return wanted
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return "bf16-mixed" if best_precision(device) == "bfloat16" else "32-true"


def _loggers(project: str, out: Path) -> list[Logger]:
    """TensorBoard's comes first: the callbacks draw into it."""
    board = TensorBoardLogger(out, name="tensorboard", version="")
    if not project:
        return [board]
    if importlib.util.find_spec("wandb") is None:
        raise ValueError("wandb=... needs the package: pip install wandb")
    # one folder is one run, however often it is resumed
    name = str(out).strip("/").replace("/", "-")
    return [board, WandbLogger(name, out, version=name, project=project, resume="allow")]
