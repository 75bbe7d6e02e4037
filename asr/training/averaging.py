"""Weight averaging: over the best checkpoints ("Attention Is All You Need", section 6.1), while training, and between a
fine-tuned model and the one that it started from."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from asr.model.lora import merge_low_rank
from asr.training.resuming import ResumableData, read_checkpoint

logger = logging.getLogger(__name__)


class BestCheckpoints(ModelCheckpoint):
    """Keeps the weights of the `count` epochs with the lowest logged dev `figure`, which the file names hold to
    `decimals` decimals. An epoch that is repeated after a kill replaces its earlier checkpoint. If a training continues
    with another dev set, earlier checkpoints are set aside as soon as an epoch is scored on the new one."""

    def __init__(
        self, data: ResumableData, out: Path, figure: str, decimals: int, count: int = 1, weights_only: bool = True
    ):
        """`weights_only`: without the optimiser's state, which is twice as large; not for a training with an `EMA`, for
        which Lightning keeps the mean together with that state."""
        super().__init__(
            out / "checkpoints",
            filename=f"{{epoch:03d}}-{{{figure}:.{decimals}f}}",
            auto_insert_metric_name=False,
            monitor=figure,
            save_top_k=count,
            save_weights_only=weights_only,
            enable_version_counter=False,
        )
        self.data = data

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.data.earlier_dev_set:
            logger.warning("the best epochs so far were chosen on another dev set: the choice starts anew")
            return
        super().load_state_dict(state_dict)  # may name files that were moved away, or more than `count`, which stay
        there = {path: figure for path, figure in self.best_k_models.items() if Path(path).is_file()}
        best = sorted(there, key=there.get)[: self.save_top_k]
        self.best_k_models = {path: there[path] for path in best}
        self.kth_best_model_path = best[-1] if best else ""

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            if rank_zero_only.rank == 0:
                for path in Path(self.dirpath).glob(f"{trainer.current_epoch:03d}-*.ckpt"):
                    path.unlink()  # of this epoch, from before a kill, after which it was repeated
                for path in best_checkpoints(Path(self.dirpath).parent) if self.data.earlier_dev_set else ():
                    path.replace(path.with_name(f"before-{path.name}"))
            self.data.earlier_dev_set = None
        super().on_validation_end(trainer, pl_module)


class EMA(WeightAveraging):
    """Exponential moving average of the weights, on the training device. LoRA's two matrices are averaged separately,
    buffers not at all."""

    def __init__(self, decay: float):
        super().__init__(use_buffers=False, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._device = trainer.strategy.root_device  # the module itself moves there later
        super().setup(trainer, pl_module, stage)
        if self._average_model is not None:
            self._average_model.n_averaged = self._average_model.n_averaged.cpu()  # read at each update


def best_checkpoints(out: Path) -> list[Path]:
    """The checkpoints in `out`, best first by the figure in their names, then by epoch: Lightning forgets which were
    best when the folder is moved."""
    return sorted(sorted((out / "checkpoints").glob("[0-9]*-*.ckpt")), key=figure_of)


def figure_of(checkpoint: Path) -> float:
    """The dev figure in the name of a checkpoint; infinite if it is no number, as if no dev utterance could be read."""
    figure = float(checkpoint.stem.split("-")[1])
    return math.inf if math.isnan(figure) else figure


def average_checkpoints(paths: Sequence[str | Path], prefix: str = "model.") -> dict[str, Tensor]:
    """The mean of the tensors named `prefix…` in Lightning checkpoints, without the prefix; summed in float64.

    Raises ValueError if `paths` is empty or a checkpoint is incomplete."""
    if not paths:
        raise ValueError("no checkpoint to average: no epoch was scored on the dev set, or its checkpoint is gone")
    totals: dict[str, Tensor] = {}
    for path in paths:
        state = merge_low_rank(read_checkpoint(Path(path))["state_dict"])
        for name, tensor in state.items():
            if name.startswith(prefix):
                name = name.removeprefix(prefix)
                totals[name] = totals.get(name, 0) + tensor.double()
    return {name: (total / len(paths)).float() for name, total in totals.items()}


def interpolate(weights: dict[str, Tensor], origin: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """(1 - share) · weights + share · origin, for tensors of the same names and shapes."""
    return {name: torch.lerp(tensor, origin[name], share) for name, tensor in weights.items()}
