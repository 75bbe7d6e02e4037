"""What all trainings share: optimiser, learning rate schedule, clipping, validation at the end."""

from __future__ import annotations

import logging
from dataclasses import asdict
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import nn

from asr.model.layers import layers_of
from asr.training.config import RunConfig
from asr.training.muon import Muon
from asr.training.resuming import LOOK_EVERY, seed_step
from asr.training.schedule import lr_factor, warmup_updates
from asr.training.sharding import Sharded, whole_norm

logger = logging.getLogger(__name__)

# A single kernel for sums over rows and over columns; in a norm's backward pass, two take a third of its time (H200).
MIXED = "triton.mix_order_reduction"
MOST_SKIPPED = 100  # updates in a row


def compile_layers(stack: nn.Module) -> None:
    """Compiles each encoder and decoder layer in place with torch.compile, into the same code for all lengths."""
    options = {MIXED: False} if MIXED in torch._inductor.list_options() else None
    for layer in layers_of(stack):
        layer.compile(dynamic=True, options=options)


class Training(L.LightningModule):
    """A LightningModule that is optimised for `updates` steps according to `settings`."""

    stack: str  # the submodule that holds all trained weights and is called as a whole
    dev_means: tuple[str, ...] = ("dev/loss",)  # the means that a validation logs, in the order of `add_dev`
    sharded: Sharded | None = None

    def __init__(self, config: RunConfig, updates: int):
        super().__init__()
        self.config, self.settings, self.seed = config, config.optimizer, config.seed
        self.updates = updates
        # updates skipped because of their gradients: in total, and the latest ones in a row
        self.register_buffer("skipped", torch.zeros(2), persistent=False)
        self.reported = 0
        self.accumulated: tuple[torch.Tensor, torch.Tensor] | None = None  # tokens: in the update's first batch, in all

    def configure_model(self) -> None:
        if self.trainer.state.fn != "fit":
            return
        if self.config.compile:
            torch.compiler.set_stance("default")  # if an earlier validation ended with an error
            compile_layers(self)
        if self.device_mesh:
            half = torch.bfloat16 if self.trainer.precision == "bf16-mixed" else None
            self.sharded = Sharded(self.get_submodule(self.stack), self.device_mesh["data_parallel"], half)

    def log_update(self, values: dict[str, torch.Tensor]) -> None:
        """Logs scalars of an update if the curves have a point there: Lightning takes about a millisecond for each."""
        if (self.trainer.global_step + 1) % self.trainer.log_every_n_steps == 0:
            self.log_dict(values)

    def add_train(self, weight: torch.Tensor, values: dict[str, torch.Tensor], empty: bool = False) -> None:
        """Adds a batch's means, scalars, to those of the epoch if they are finite: skipped updates do not count.
        `weight`: the number of tokens or frames that they are over; `empty`: they are over none, and are not logged."""
        if not empty:
            self.log_update({f"train/{name}_step": value.detach() for name, value in values.items()})
        means = torch.stack([value.detach().double() for value in values.values()])
        weight = weight * means.isfinite().all()
        sums = torch.cat([weight * means.nan_to_num(0.0, 0.0, 0.0), weight[None]])
        self.train_means = tuple(values)  # their names
        self.train_sums = sums if self.train_sums is None else self.train_sums + sums

    def log_train_means(self) -> None:
        """Logs the means of the epoch, over all processes."""
        if self.train_sums is not None:
            *sums, weight = self.trainer.strategy.reduce(self.train_sums, reduce_op="sum")
            means = zip(self.train_means, sums, strict=True)
            self.log_dict({f"train/{name}_epoch": (total / weight).float() for name, total in means})

    def in_update(self, mean: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of a batch, its `mean ()` over `tokens ()`, scaled so that all tokens of an update weigh the same:
        gradients are averaged over processes, and summed over accumulated batches."""
        count = tokens.float()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(count)
        count = count.clamp(min=1) / self.trainer.world_size
        if self.trainer.accumulate_grad_batches > 1:
            first, before = self.accumulated or (count, torch.zeros_like(count))
            self.accumulated = first, before + count
            count = first
        return mean * (tokens / count)

    def _weigh_gradients(self) -> None:
        """Rescales gradients of accumulated batches, whose losses Lightning divides by the full number of batches."""
        if self.accumulated:
            first, tokens = self.accumulated
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            torch._foreach_mul_(gradients, self.trainer.accumulate_grad_batches * first / tokens)
            self.accumulated = None

    def on_validation_start(self) -> None:
        if self.config.compile:  # everything would be compiled again for running without gradients
            torch.compiler.set_stance("force_eager")
        if self.sharded:
            self.set_submodule(self.stack, self.sharded.whole())

    def on_validation_epoch_start(self) -> None:
        self.dev_sums = torch.zeros(len(self.dev_means) + 1, dtype=torch.double, device=self.device)

    def add_dev(self, weight: torch.Tensor, *values: torch.Tensor) -> None:
        """Adds a batch's means, scalars, to the validation's; `weight`: the tokens or frames that they are over."""
        self.dev_sums += torch.stack([*(weight * value.double() for value in values), weight.double()])

    def on_validation_epoch_end(self) -> None:
        if self.sharded:
            self.set_submodule(self.stack, self.sharded.shares())
        # a process may have had no readable batch, but each one contributes its sums
        *sums, weight = self.trainer.strategy.reduce(self.dev_sums, reduce_op="sum")
        self.log_dict({name: (total / weight).float() for name, total in zip(self.dev_means, sums, strict=True)})

    def on_validation_end(self) -> None:
        if self.config.compile:
            torch.compiler.set_stance("default")

    def on_train_start(self) -> None:
        self._take_settings()
        self.on_train_epoch_start()  # which is not called for an epoch that is resumed

    def _take_settings(self) -> None:
        """Applies the current options to the optimiser, whose state holds the earlier ones if it was resumed."""
        settings, scheduler = self.settings, self.lr_schedulers()
        scheduler.base_lrs = [settings.lr] * len(scheduler.base_lrs)
        lr = settings.lr * lr_factor(scheduler.last_epoch, settings, self.updates)
        for group in scheduler.optimizer.param_groups:
            decay = settings.weight_decay if any(p.ndim > 1 for p in group["params"]) else 0.0
            group.update(initial_lr=settings.lr, lr=lr, betas=tuple(settings.betas), weight_decay=decay)
            group.update(fused=self._fused)
            for p in group["params"]:  # counted where the kernel reads it: on the device if fused, else on the CPU
                if "step" in (state := scheduler.optimizer.state.get(p, {})):
                    state["step"] = state["step"].to(p.device if self._fused else "cpu")

    def on_train_epoch_start(self) -> None:
        self.train_sums: torch.Tensor | None = None
        if self.trainer.current_epoch == self.trainer.max_epochs - 1:  # which is validated, whatever validate_every is
            self.trainer.check_val_every_n_epoch = 1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        seed_step(self.device, self.seed, self.current_epoch, self.global_rank, batch_idx)
        # the x-axis of the curves: after resuming within an epoch Lightning would count an update twice
        self.trainer.fit_loop.epoch_loop._batches_that_stepped = self.trainer.global_step

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["config"] = asdict(self.config)

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        if "current_model_state" in checkpoint and not getattr(self.config, "ema", 0.0):
            checkpoint["state_dict"] = checkpoint.pop("current_model_state")  # what was trained, not its moving average
        states = checkpoint.get("state_dict", {}), self.state_dict()
        saved, own = ({name: tuple(weight.shape) for name, weight in state.items()} for state in states)
        other = next((name for name in own | saved if saved.get(name) != own.get(name)), None)
        if saved and other:  # FSDP's weights are loaded elsewhere
            shapes = f"{saved.get(other, 'missing')} in the checkpoint and {own.get(other, 'missing')} now"
            raise ValueError(f"resume=true: {other} is {shapes}; init_from, tokenizer or lora_rank is not what it was")

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._weigh_gradients()
        # Lightning's own clipping refuses fused optimisers because of float16's loss scale, which bf16 does not have
        norm = whole_norm(nn.utils.clip_grad_norm_(self.parameters(), self.settings.clip))
        self.log_update({"train/gradient_norm": norm})
        broken = (~norm.isfinite()).float()
        self.skipped = torch.stack([self.skipped[0] + broken, (self.skipped[1] + 1) * broken])
        if self._fused:  # which skips the update on the device, as for a loss scale that was too large
            optimizer.found_inf = broken

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % LOOK_EVERY == LOOK_EVERY - 1:
            self._report_skipped()

    def on_train_epoch_end(self) -> None:
        self._report_skipped()

    def _report_skipped(self) -> None:
        total, in_a_row = (int(count) for count in self.skipped.tolist())
        if total > self.reported:
            logger.warning("%d updates have been skipped so far: their gradients were not finite", total)
            self.reported = total
        if in_a_row >= MOST_SKIPPED:
            raise FloatingPointError(
                f"the gradients of the last {in_a_row} updates were not finite: lower optimizer.lr, and resume"
            )

    @property
    def _fused(self) -> bool:
        # a fused optimiser divides the gradients by float16's loss scale itself: too late for the clipping above
        return self.trainer.precision != "16-mixed"

    def configure_optimizers(self):
        settings = self.settings
        trained = [p for p in self.parameters() if p.requires_grad]
        linears = [m for layer in layers_of(self) for m in layer.modules() if isinstance(m, nn.Linear)]
        matrices = [m.weight for m in linears if m.weight.requires_grad] if settings.kind == "muon" else []
        decayed = [p for p in trained if p.ndim > 1 and not any(p is matrix for matrix in matrices)]
        rest = [p for p in trained if p.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        common = {"lr": settings.lr, "betas": tuple(settings.betas), "fused": self._fused}
        if matrices:
            optimizer = Muon(matrices, groups, weight_decay=settings.weight_decay, **common)
        else:
            optimizer = torch.optim.AdamW(groups, **common)
        warmup = warmup_updates(settings, self.updates)
        if warmup >= self.updates > 1 and self.trainer.is_global_zero:
            remedy = "lower it (0.1 is a tenth of all updates), or raise epochs"
            said = "optimizer.warmup: the rate rises for all %d updates (warm-up: %d): %s"
            logger.warning(said, self.updates, warmup, remedy)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, partial(lr_factor, config=settings, updates=self.updates)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "name": "lr"}}
