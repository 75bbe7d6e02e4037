import errno
import inspect
import os
import shutil
import signal
import types
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asr.training.averaging import best_checkpoints
from asr.training.config import OptimizerConfig, TrainConfig
from asr.training.data import SpeechData
from asr.training.module import SpeechTraining
from asr.training.resuming import LastCheckpoint, Resumable, WholeCheckpoints, read_checkpoint, seed_step, step_seed
from asr.training.run import train
from tests.training.tones import options


class Counting:
    """A sampler whose batches are named by epoch and number."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self):
        return iter([f"{self.epoch}.{i}" for i in range(4)])


def batches(sampler: Resumable, epoch: int) -> list[tuple[str, int]]:
    sampler.set_epoch(epoch)
    return list(sampler)


def test_batches_that_were_trained_on_are_left_out_of_their_epoch_alone():
    whole, resumed = Resumable(Counting(), seed=7), Resumable(Counting(), seed=7, done=(1, 3))
    assert batches(resumed, 1) == batches(whole, 1)[3:]
    assert batches(resumed, 2) == batches(whole, 2)


def test_each_step_of_each_process_has_a_seed_of_its_own():
    seeds = [step_seed(*place) for place in ((1, 0, 0, 0), (2, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1))]
    assert len(set(seeds)) == 5 and seeds[0] == step_seed(1, 0, 0, 0)
    torch.manual_seed(max(seeds))
    seed_step(torch.device("cpu"), 1, 0, 0, 0)
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(seeds[0]))


def test_each_batch_of_each_epoch_has_random_numbers_of_its_own():
    drawn, first = [], (1, 0, 0, 0)
    for seed, epoch, rank, batch in (first, (2, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 0), (1, 0, 0, 1), first):
        training = MagicMock(seed=seed, current_epoch=epoch, global_rank=rank, device=torch.device("cpu"))
        SpeechTraining.on_train_batch_start(training, None, batch)
        drawn.append(torch.rand(()).item())
    assert len(set(drawn)) == 5 and drawn[0] == drawn[-1]


def test_a_training_is_saved_once_its_minutes_are_over(tmp_path, monkeypatch):
    saved, trainer = [], types.SimpleNamespace(world_size=1, accumulate_grad_batches=1)
    trainer.save_checkpoint = lambda path: saved.append((now, path.name))
    last = LastCheckpoint(tmp_path, minutes=10)
    last.saved = 0.0
    for now in (599.0, 601.0, 1200.0, 1202.0):
        monkeypatch.setattr("time.monotonic", lambda now=now: now)
        last.on_train_batch_start(trainer, None, None, 1)
    assert saved == [(601.0, "last.ckpt"), (1202.0, "last.ckpt")]


def noted_losses(monkeypatch) -> dict[tuple[int, int], float]:
    """The loss of each (epoch, batch) that is trained on from now on."""
    found = {}
    step = SpeechTraining.training_step

    def recorded(self, batch):
        loss = step(self, batch)
        found[self.trainer.current_epoch, self.trainer.fit_loop.epoch_loop.batch_idx] = loss.item()
        return loss

    monkeypatch.setattr(SpeechTraining, "training_step", recorded)
    return found


@pytest.fixture
def losses(monkeypatch) -> dict[tuple[int, int], float]:
    """The loss of each (epoch, batch) trained on since the last `clear`."""
    return noted_losses(monkeypatch)


def train_until_killed(config: TrainConfig, place: tuple[int, int], monkeypatch) -> None:
    """Trains until just before the batch at `place`: its epoch and number."""
    start = LastCheckpoint.on_train_batch_start

    def killed(self, trainer, module, batch, batch_idx):
        start(self, trainer, module, batch, batch_idx)
        if (trainer.current_epoch, batch_idx) == place:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LastCheckpoint, "on_train_batch_start", killed)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            train(config)


def drawn_at(out: Path) -> list[int]:
    """The updates at which the curves of a training have points."""
    board = EventAccumulator(str(out / "tensorboard"))
    board.Reload()
    return [point.step for point in board.Scalars("train/total_epoch")]


@pytest.mark.parametrize(("accumulated", "optimizer"), [(1, "adamw"), (2, "adamw"), (1, "muon")])
def test_a_training_killed_within_an_epoch_goes_on_as_if_nothing_had_happened(
    corpus, tmp_path, losses, monkeypatch, caplog, accumulated, optimizer
):
    caplog.set_level("INFO", "asr")
    settings = ["epochs=2", "model.dropout=0.2", "save_minutes=0", f"optimizer.kind={optimizer}"]
    settings += ["data.batch_seconds=5", "data.max_seconds=5", f"data.global_batch_seconds={5 * accumulated}"]
    train(options(corpus, tmp_path / "whole", *settings))
    whole = dict(losses)
    losses.clear()

    train_until_killed(options(corpus, tmp_path / "parts", *settings), (1, 3), monkeypatch)
    before = dict(losses)
    losses.clear()
    train(options(corpus, tmp_path / "parts", *settings, "resume=true"))
    assert min(losses) == (1, 3 if accumulated == 1 else 2)
    assert (before | losses).keys() == whole.keys()
    for place, loss in whole.items():
        assert (before | losses)[place] == pytest.approx(loss, abs=1e-6), place
    assert drawn_at(tmp_path / "parts") == drawn_at(tmp_path / "whole")
    assert caplog.text.count("since it was resumed") == 1


TWO_EPOCHS = ("epochs=2", "validate_every=1")


@pytest.fixture(scope="module")
def whole(corpus, tmp_path_factory) -> tuple[Path, dict[tuple[int, int], float]]:
    """A training of `TWO_EPOCHS` that nothing interrupts: its folder and its losses."""
    with pytest.MonkeyPatch.context() as patch:
        found = noted_losses(patch)
        train(options(corpus, out := tmp_path_factory.mktemp("whole"), *TWO_EPOCHS))
    return out, found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("hook", ["training_step", "validation_step"])
def test_a_training_that_is_told_to_end_saves_what_it_has_and_goes_on_as_if_nothing_had_happened(
    whole, corpus, tmp_path, losses, monkeypatch, hook, number
):
    handler, step, made = signal.getsignal(number), getattr(SpeechTraining, hook), []

    def told(self, batch):
        place = self.trainer.current_epoch, self.trainer.fit_loop.epoch_loop.batch_idx
        if not made and place >= (int(number == signal.SIGINT), 2):  # in the first epoch, or in the last
            made.append(self.trainer.global_step + (hook == "training_step"))  # including the update in progress
            os.kill(os.getpid(), number)
        return step(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(SpeechTraining, hook, told)
        with pytest.raises(SystemExit):
            train(options(corpus, tmp_path, *TWO_EPOCHS))
    assert signal.getsignal(number) == handler
    assert [read_checkpoint(tmp_path / "checkpoints" / "last.ckpt")["global_step"]] == made
    train(options(corpus, tmp_path, *TWO_EPOCHS, "resume=true"))
    assert losses == pytest.approx(whole[1], abs=1e-6)
    assert drawn_at(tmp_path) == drawn_at(whole[0])


def test_only_a_second_ctrl_c_does_not_wait(tmp_path):
    last = LastCheckpoint(tmp_path, minutes=10)
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        last._end(number, None)
    with pytest.raises(KeyboardInterrupt):
        last._end(signal.SIGINT, None)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_training_goes_on_at_the_rate_that_is_asked_for_now(corpus, tmp_path, optimizer):
    common = [f"optimizer.kind={optimizer}", "optimizer.schedule=inverse_sqrt"]
    train(options(corpus, tmp_path, "epochs=1", *common))
    before = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    changed = ["optimizer.lr=1e-7", "optimizer.weight_decay=0.5", "optimizer.betas=[0.8,0.9]"]
    train(options(corpus, tmp_path, "epochs=2", *common, *changed, "resume=true"))
    after = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert after["global_step"] > before["global_step"]
    groups = after["optimizer_states"][0]["param_groups"]
    assert all(0 < group["lr"] <= 1e-7 and list(group["betas"]) == [0.8, 0.9] for group in groups)
    assert {group["weight_decay"] for group in groups} == {0.0, 0.5}
    for name, weight in before["state_dict"].items():
        torch.testing.assert_close(after["state_dict"][name], weight, atol=1e-5, rtol=1e-5)


def test_a_training_begun_in_float16_goes_on_without_a_loss_scale(corpus, tmp_path):
    train(options(corpus, tmp_path, "epochs=1"))
    last = tmp_path / "checkpoints" / "last.ckpt"
    checkpoint = torch.load(last, weights_only=True)
    for group in checkpoint["optimizer_states"][0]["param_groups"]:
        group["fused"] = False  # as precision=16-mixed sets it on a GPU
    torch.save(checkpoint, last)
    train(options(corpus, tmp_path, "epochs=2", "resume=true"))
    groups = torch.load(last, weights_only=True)["optimizer_states"][0]["param_groups"]
    assert all(group["fused"] for group in groups)


def test_a_training_goes_on_where_it_stopped(corpus, tmp_path, monkeypatch):
    whole, _ = train(options(corpus, tmp_path / "whole", "epochs=4", "data.speeds=[1.0]"))

    step = SpeechTraining.training_step

    def interrupted(self, batch):
        if self.trainer.current_epoch == 2:
            raise RuntimeError("the power went")
        return step(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(SpeechTraining, "training_step", interrupted)
        with pytest.raises(RuntimeError, match="the power went"):
            train(options(corpus, tmp_path / "parts", "epochs=4", "data.speeds=[1.0]"))
    with pytest.raises(FileExistsError, match="resume=true"):
        train(options(corpus, tmp_path / "parts", "epochs=4"))
    resumed, _ = train(options(corpus, tmp_path / "parts", "epochs=4", "data.speeds=[1.0]", "resume=true"))
    last = [torch.load(f.parent / "checkpoints" / "last.ckpt", weights_only=True) for f in (whole, resumed)]
    assert last[0]["global_step"] == last[1]["global_step"]
    assert last[0]["epoch"] == last[1]["epoch"] == 3

    (tmp_path / "parts").rename(tmp_path / "moved")
    moved, _ = train(options(corpus, tmp_path / "moved", "epochs=4", "data.speeds=[1.0]", "resume=true"))
    assert moved == tmp_path / "moved" / "model"


def test_a_training_that_ran_out_of_patience_goes_on_only_with_more(corpus, tmp_path):
    idle = options(corpus, tmp_path, "epochs=9", "validate_every=1", "optimizer.lr=1e-9")
    for resume, patience, epochs in [(False, 1, 2), (True, 1, 2), (True, 2, 3)]:
        train(replace(idle, resume=resume, patience=patience))
        last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
        assert last["epoch"] + 1 == epochs


def test_checkpoints_of_another_training_are_not_averaged(corpus, tmp_path):
    train(options(corpus, tmp_path, "epochs=1"))
    last = tmp_path / "checkpoints" / "last.ckpt"
    (best,) = best_checkpoints(tmp_path)
    last.unlink()
    with pytest.raises(FileExistsError, match=f"{best.name} is of a training that ended before its first"):
        train(options(corpus, tmp_path, "epochs=1"))
    best.rename(best.with_name("000-0.00.ckpt"))  # the best possible WER
    train(options(corpus, tmp_path, "epochs=1", "resume=true"))
    assert "000-0.00.ckpt" not in {path.name for path in best_checkpoints(tmp_path)}


def test_an_epoch_whose_batches_are_others_now_begins_anew(corpus, tmp_path, losses, monkeypatch, caplog):
    settings = ["epochs=2", "save_minutes=0"]
    train_until_killed(options(corpus, tmp_path, *settings), (1, 3), monkeypatch)
    losses.clear()
    train(options(corpus, tmp_path, *settings, "data.batch_seconds=15", "data.global_batch_seconds=15", "resume=true"))
    assert "starts anew" in caplog.text
    assert sorted(losses) == [(1, i) for i in range(len(losses))] and losses


def test_a_checkpoint_that_could_not_be_written_leaves_the_last_one_whole(tmp_path, monkeypatch):
    WholeCheckpoints().save_checkpoint({"epoch": 1}, path := tmp_path / "checkpoints" / "last.ckpt")
    written = Path.write_bytes

    def half(self, content):
        written(self, bytes(content)[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(OSError, match=r"No space left on device: '.*/last\.ckpt'"):
        WholeCheckpoints().save_checkpoint({"epoch": 2}, path)
    assert read_checkpoint(path) == {"epoch": 1}
    assert list(path.parent.iterdir()) == [path]


def test_checkpoints_need_no_other_folder(corpus, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.mkstemp", full)
    train(options(corpus, tmp_path, "epochs=1"))
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} > {"last.ckpt"}


@pytest.fixture
def broken(monkeypatch) -> set[int]:
    """The updates whose loss is made NaN."""
    updates: set[int] = set()
    step = SpeechTraining.training_step

    def poisoned(self, batch):
        loss = step(self, batch)
        return loss * torch.nan if self.trainer.global_step in updates else loss

    monkeypatch.setattr(SpeechTraining, "training_step", poisoned)
    return updates


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_update_that_is_not_finite_is_left_out_and_counted(corpus, tmp_path, broken, caplog, optimizer):
    broken |= {1, 2}
    folder, _ = train(options(corpus, tmp_path / "exp", "epochs=1", f"optimizer.kind={optimizer}"))
    state = torch.load(folder.parent / "checkpoints" / "last.ckpt", weights_only=True)
    assert all(tensor.isfinite().all() for tensor in state["state_dict"].values())
    made = {int(slots["step"]) for slots in state["optimizer_states"][0]["state"].values()}
    assert made == {state["global_step"] - 2}
    assert "2 updates have been skipped" in caplog.text


def test_a_training_whose_gradients_stay_broken_stops(corpus, tmp_path, broken, monkeypatch):
    monkeypatch.setattr("asr.training.base.MOST_SKIPPED", 3)
    broken |= set(range(2, 99))
    with pytest.raises(FloatingPointError, match="not finite: lower optimizer.lr"):
        train(options(corpus, tmp_path / "exp", "epochs=3"))


@pytest.mark.parametrize("share", [0.0, 0.5, 0.999])
def test_a_checkpoint_that_is_not_whole_is_named_and_left_alone(tmp_path, monkeypatch, share):
    path = tmp_path / "last.ckpt"
    torch.save({"config": {}, "state_dict": {"weight": torch.randn(1000)}}, path)
    part = path.read_bytes()[: int(share * path.stat().st_size)]
    path.write_bytes(part)
    with pytest.raises(ValueError, match=r"last\.ckpt is not a complete checkpoint"):
        read_checkpoint(path)
    assert path.read_bytes() == part
    monkeypatch.setattr(torch, "load", MagicMock(side_effect=PermissionError(13, "denied", str(path))))
    with pytest.raises(PermissionError, match=r"denied: '.*/last\.ckpt'"):
        read_checkpoint(path)


def test_updates_are_counted_where_the_optimisers_kernel_looks_and_made_at_the_rate_of_now():
    """A fused kernel looks on the device, the other one on the CPU; meta stands for a GPU."""
    weight = torch.nn.Parameter(torch.empty(3, 3, device="meta"))
    optimizer = torch.optim.AdamW([weight])
    optimizer.state[weight]["step"] = torch.tensor(7.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1.0)
    about = {"settings": OptimizerConfig(lr=2.0, weight_decay=0.3), "updates": 100, "lr_schedulers": lambda: scheduler}
    for fused, device in ((False, "cpu"), (True, "meta")):
        SpeechTraining._take_settings(types.SimpleNamespace(**about, _fused=fused))
        assert optimizer.param_groups[0].items() >= {"fused": fused, "lr": 0.2, "weight_decay": 0.3}.items()
        assert optimizer.state[weight]["step"].device.type == device


@pytest.mark.parametrize("told_by", [(SpeechData, "val_dataloader"), (SpeechTraining, "validation_step")])
def test_told_to_end_while_the_average_is_validated_it_ends_at_once(corpus, tmp_path, monkeypatch, told_by):
    method, told = getattr(*told_by), []

    def tell(self, *batch):
        if self.trainer.state.fn == "validate":
            told.append(batch)
            os.kill(os.getpid(), signal.SIGTERM)
        return method(self, *batch)

    tell.__signature__ = inspect.signature(method)  # Lightning chooses the arguments by it
    monkeypatch.setattr(*told_by, tell)
    notified = []  # the notifier broadcasts from wherever the signal interrupts
    monkeypatch.setattr(_SignalConnector, "_sigterm_notifier_fn", lambda *_: notified.append(1))
    config = options(corpus, tmp_path, "epochs=2", "validate_every=1", "data.batch_seconds=2", "data.max_seconds=2")
    with pytest.raises(SystemExit):
        train(config)
    assert len(told) == 1 and not notified
    monkeypatch.undo()
    train(replace(config, resume=True))


def test_patience_begins_anew_with_another_dev_set(corpus, tmp_path):
    idle = options(corpus, tmp_path, "epochs=9", "validate_every=1", "optimizer.lr=1e-9", "patience=1")
    train(idle)
    train(replace(idle, resume=True, data=replace(idle.data, dev=[str(corpus / "train")])))
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["epoch"] + 1 == 4  # two more: the first on the new set, and one that is no better


def test_fewer_epochs_than_there_were_are_refused(corpus, tmp_path):
    train(options(corpus, tmp_path, "epochs=3"))
    for fewer in (1, 2):
        with pytest.raises(ValueError, match=f"epochs={fewer}: the training in .* is in epoch 3 already"):
            train(options(corpus, tmp_path, f"epochs={fewer}", "resume=true"))
    train(options(corpus, tmp_path, "epochs=3", "resume=true"))


def test_what_it_began_from_is_another_model_now(corpus, tmp_path):
    train(options(corpus, tmp_path / "init", "epochs=1", "validate_every=1"))
    train(options(corpus, tmp_path / "own", "epochs=1", f"init_from={tmp_path / 'init' / 'model'}"))
    for name, other in (("wide", "model.ffn_dim=48"), ("deep", "model.encoder_layers=3")):
        train(options(corpus, tmp_path / name, "epochs=1", other))
        shutil.copytree(tmp_path / name / "model", tmp_path / "init" / "model", dirs_exist_ok=True)
        with pytest.raises(ValueError, match=r"resume=true: .* in the checkpoint and .*init_from"):
            train(options(corpus, tmp_path / "own", "epochs=2", "resume=true", f"init_from={tmp_path}/init/model"))
