"""What every training starts with: its seed, the Lightning trainer, its loggers, the features' statistics."""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import random
import secrets
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, RichProgressBar
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.utilities import rank_zero_only

from asr.audio.features import FrontEnd, RunningStatistics
from asr.corpus import iterate
from asr.heap import keep_kernels
from asr.model.autocast import best_precision
from asr.model.dot_product import leave_out_cudnn
from asr.training.averaging import best_checkpoints
from asr.training.config import RunConfig, SoundRunConfig
from asr.training.data import SoundData
from asr.training.memory import FreedMemory, LargestFirst
from asr.training.resuming import LastCheckpoint, WholeCheckpoints, read_checkpoint
from asr.training.sharding import fully_sharded

logger = logging.getLogger(__name__)

STATISTICS_SECONDS = 3600.0  # of audio from which mean and variance are computed
KERNELS = 16384  # about 50 for each batch shape: buckets times speeds


def begin(config: RunConfig) -> Path | None:
    """Seeds every generator and configures the kernels. Returns the `checkpoint_of` the training, and raises what that
    raises; ValueError also for a precision that a CPU does not have, and for a number of processes that does not fit
    the job."""
    if config.precision == "16-mixed" and accelerator() == "cpu":  # which Lightning would treat as bf16-mixed
        raise ValueError("precision=16-mixed is for a GPU: on a CPU take bf16-mixed or 32-true")
    _cluster(config)  # checked before anything is read: it may not fit
    last = checkpoint_of(config)
    if not last:  # the best epochs of a training that died before its first one would be averaged
        for best in best_checkpoints(Path(config.out)):
            best.unlink(missing_ok=True)
    if torch.cuda.is_available():
        leave_out_cudnn()
    else:
        keep_kernels(KERNELS)  # otherwise kernels of some shapes are rebuilt: training in bfloat16 takes a third longer
    L.seed_everything(config.seed, workers=True, verbose=False)
    return last


def checkpoint_of(config: RunConfig) -> Path | None:
    """The checkpoint from which the training in `config.out` continues, None at its start.

    Raises FileExistsError if `config.out` holds a training that is not to be resumed, ValueError if the training cannot
    continue as `config` says."""
    last = Path(config.out) / "checkpoints" / "last.ckpt"
    if last.exists():
        if not config.resume:
            raise FileExistsError(
                f"{config.out} already holds a training: resume=true continues it, out=... starts another"
            )
        checkpoint = read_checkpoint(last)
        epoch, strategy = checkpoint["epoch"], checkpoint["config"].get("strategy")
        if epoch >= config.epochs:
            raise ValueError(f"epochs={config.epochs}: the training in {config.out} is in epoch {epoch + 1} already")
        if (strategy == "fsdp") != (getattr(config, "strategy", None) == "fsdp"):
            raise ValueError(
                f"{config.out} was started with strategy={strategy} and must continue so:"
                " fsdp keeps the optimiser's state in another order"
            )
        return last
    if not config.resume and (left := best_checkpoints(Path(config.out))):
        raise FileExistsError(
            f"{left[0]} is of a training that ended before its first last.ckpt: move it away, choose another out=,"
            " or start again with resume=true, which removes it"
        )
    return None


def lightning_trainer(config: RunConfig, callbacks: list[L.Callback], **settings: Any) -> L.Trainer:
    """A Lightning trainer with the settings and callbacks that all trainings share, with `callbacks` and `settings`."""
    on_terminal = sys.stderr.isatty()
    latest = LastCheckpoint(Path(config.out) / "checkpoints", config.save_minutes)
    return L.Trainer(
        max_epochs=config.epochs,
        accelerator=accelerator(),
        precision=lightning_precision(config.precision),
        callbacks=[FreedMemory(), *callbacks, latest, *([RichProgressBar()] if on_terminal else [])],
        enable_progress_bar=on_terminal,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        log_every_n_steps=10,
        devices=config.devices or "auto",
        num_nodes=config.nodes,
        plugins=[WholeCheckpoints(), *_cluster(config)],
        **settings,
    )


def new_trainer(
    config: SoundRunConfig, data: SoundData, model: torch.nn.Module, callbacks: list[L.Callback]
) -> tuple[L.Trainer, int]:
    """The Lightning trainer for `model`, and the approximate number of its updates (batches depend on the shuffle);
    logs the size of the training."""
    trainer = lightning_trainer(
        config,
        [LargestFirst(data), *callbacks, LearningRateMonitor("step")],
        check_val_every_n_epoch=config.validate_every,
        strategy=fully_sharded(device_count(config)) if config.strategy == "fsdp" else config.strategy,
        logger=_loggers(config.wandb, Path(config.out), config.resume),
    )
    accumulate = trainer.accumulate_grad_batches = data.batches_of_update
    updates = config.epochs * math.ceil(data.batches_per_epoch() / trainer.world_size / accumulate)
    said = extent(data, model), trainer.precision, updates, accumulate * data.batch_seconds * trainer.world_size
    logger.info("%s, %s, %d updates of at most %.0f s", *said)
    return trainer, updates


def device_count(config: RunConfig) -> int:
    """The number of training processes over all machines, one per device. Raises ValueError if this machine has GPUs,
    but fewer than `config.devices`."""
    if torch.cuda.is_available() and config.devices > torch.cuda.device_count():
        raise ValueError(f"devices={config.devices}: this machine has GPUs for {torch.cuda.device_count()}")
    return config.nodes * (config.devices or max(1, torch.cuda.device_count()))


def _cluster(config: RunConfig) -> list[ClusterEnvironment]:
    """The plugin that tells Lightning who starts the processes in a SLURM job, where its own choice does not fit: the
    tasks are the processes, or a single task starts them. Raises ValueError for another number of tasks, or of
    processes that torchrun started: for one device Lightning would have each train on its own, all into one folder; and
    for several machines without an address to meet at, where each would wait for the others.

    Lightning's requeueing is disabled: it keeps a checkpoint in the working directory, from which the next training
    there would start, whichever that is."""
    if TorchElasticEnvironment.detect():
        started, processes = int(os.environ["WORLD_SIZE"]), device_count(config)
        if started != processes:
            raise ValueError(f"torchrun has started {started} processes, and devices= and nodes= are {processes}")
        return []
    if not SLURMEnvironment.detect():
        others = LSFEnvironment.detect() or MPIEnvironment.detect() or "MASTER_ADDR" in os.environ
        if config.nodes > 1 and not others:
            raise ValueError(f"nodes={config.nodes}: torchrun or srun starts a training on several machines")
        return []
    tasks, processes = int(os.environ["SLURM_NTASKS"]), device_count(config)
    if tasks == processes:
        try:
            return [SLURMEnvironment(auto_requeue=False)]
        except RuntimeError as error:  # --ntasks instead of --ntasks-per-node
            raise ValueError(str(error)) from None
    if tasks == config.nodes == 1:
        return [LightningEnvironment()]
    raise ValueError(f"SLURM has started {tasks} tasks, and devices= and nodes= are {processes} processes")


def accelerator() -> str:
    """CUDA or the CPU: no other is supported here (Lightning's own choice would be MPS on a Mac)."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def extent(data: SoundData, model: torch.nn.Module) -> str:
    """The size of a training, in words."""
    parameters = sum(p.numel() for p in model.parameters()) / 1e6
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6
    of_them = f", {trained:.2f} M of them trained" if trained < parameters else ""
    hours, count = data.train_seconds / 3600, len(data.train_cuts)
    return f"{hours:.2f} h of audio in {count} utterances, {parameters:.1f} M parameters{of_them}"


@torch.inference_mode()
def set_statistics(front_end: FrontEnd, data: SoundData) -> None:
    """Sets the features' mean and deviation from a part of the training set, if the front end uses either. Raises
    ValueError if none of it can be read."""
    if front_end.config.normalization == "cmvn":
        return
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
    return "bf16-mixed" if best_precision(accelerator()) == "bfloat16" else "32-true"


def _loggers(project: str, out: Path, resume: bool) -> list[Logger]:
    """The loggers, TensorBoard's first: the callbacks draw into it."""
    board = TensorBoardLogger(out, name="tensorboard", version="")
    if not project:
        return [board]
    if importlib.util.find_spec("wandb") is None:
        raise ValueError("wandb=... needs the package: pip install wandb")
    name, kept = str(out).strip("/").replace("/", "-"), out / "wandb.id"  # one run, however often it is resumed
    if not rank_zero_only.rank and not (resume and kept.is_file()):
        kept.write_text(f"{name}-{secrets.token_hex(4)}")
    version = kept.read_text() if kept.is_file() else None  # of several processes only the first one logs
    import wandb

    if wandb.run is not None:  # of another training in this process (-m), in which Lightning would go on drawing
        wandb.finish()
    return [board, WandbLogger(name, out, version=version, project=project, resume="allow")]
