"""What every training here does alike: AdamW, the schedule of the learning rate, clipping, validation at the end."""

from __future__ import annotations

import lightning as L
import torch

from asr.training.config import OptimizerConfig
from asr.training.schedule import rate


class Optimized(L.LightningModule):
    """A LightningModule that is optimised for `updates` steps as `settings` say."""

    def __init__(self, settings: OptimizerConfig, updates: int):
        super().__init__()
        self.settings = settings
        self.updates = updates

    def on_train_epoch_start(self) -> None:
        if self.trainer.current_epoch == self.trainer.max_epochs - 1:  # whatever validate_every, the last one counts
            self.trainer.check_val_every_n_epoch = 1

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        # Lightning's own clipping refuses fused optimisers, for the sake of float16's loss scale, which bf16 has not
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), self.settings.clip)
        self.log("train/gradient_norm", norm)

    def configure_optimizers(self):
        settings = self.settings
        decayed = [p for p in self.parameters() if p.ndim > 1]
        rest = [p for p in self.parameters() if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        # a fused optimiser takes float16's loss scale out of the gradients itself: too late for the clipping above
        fused = self.trainer.precision != "16-mixed"
        optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=tuple(settings.betas), fused=fused)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: rate(update, settings, self.updates))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}
