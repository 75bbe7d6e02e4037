"""Where a training runs: devices, and the processes that a cluster has started; and what it begins with."""

import sys
from unittest.mock import MagicMock

import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment

from asr.audio.config import FeatureConfig
from asr.audio.features import FrontEnd
from asr.audio.reading import SAMPLE_RATE
from asr.corpus import iterate
from asr.training.data import SoundData
from asr.training.run import train
from asr.training.trainer import _cluster, _loggers, device_count, set_statistics
from tests.training.tones import options


def test_more_gpus_than_there_are_are_refused(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(ValueError, match="devices=4: this machine has GPUs for 1"):
        device_count(options(corpus, tmp_path, "devices=4"))


def test_half_precision_is_for_a_gpu(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="precision=16-mixed is for a GPU"):
        train(options(corpus, tmp_path / "run", "precision=16-mixed"))
    assert not any(tmp_path.iterdir())


SLURM = {
    "SLURM_NTASKS": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_JOB_ID": "1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}


def cluster(monkeypatch, config, **variables):
    for name, value in (SLURM | variables).items():
        monkeypatch.setenv(name, value)
    return _cluster(config)


def test_slurms_tasks_are_the_processes_and_nothing_is_requeued(corpus, tmp_path, monkeypatch):
    assert _cluster(options(corpus, tmp_path)) == []
    [environment] = cluster(monkeypatch, options(corpus, tmp_path, "devices=2"))
    assert isinstance(environment, SLURMEnvironment) and not environment.auto_requeue


def test_one_task_of_slurm_starts_the_processes_of_its_machine(corpus, tmp_path, monkeypatch):
    [environment] = cluster(monkeypatch, options(corpus, tmp_path, "devices=2"), SLURM_NTASKS="1")
    assert isinstance(environment, LightningEnvironment)


def test_tasks_that_lightning_does_not_know_by_machine_are_one_line(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(SLURM, "SLURM_NTASKS_PER_NODE", "")
    monkeypatch.delitem(SLURM, "SLURM_NTASKS_PER_NODE")
    with pytest.raises(ValueError, match="--ntasks-per-node"):
        cluster(monkeypatch, options(corpus, tmp_path, "devices=2"))


@pytest.mark.parametrize(("settings", "tasks"), [(["devices=4"], "2"), (["devices=1", "nodes=2"], "1")])
def test_other_tasks_than_processes_are_refused(corpus, tmp_path, monkeypatch, settings, tasks):
    with pytest.raises(ValueError, match=f"SLURM has started {tasks} tasks, and devices= and nodes= are"):
        cluster(monkeypatch, options(corpus, tmp_path, *settings), SLURM_NTASKS=tasks)


def test_machines_that_nothing_connects_are_refused_and_do_not_wait_for_each_other(corpus, tmp_path, monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ValueError, match="nodes=2: torchrun or srun starts"):
        _cluster(options(corpus, tmp_path, "nodes=2"))
    with monkeypatch.context() as patch:
        patch.setattr("asr.training.trainer.LSFEnvironment.detect", lambda: True)
        assert _cluster(options(corpus, tmp_path, "nodes=2")) == []
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")  # each process started by hand, as Lightning documents
    assert _cluster(options(corpus, tmp_path, "nodes=2")) == []


def test_other_processes_of_torchrun_than_asked_for_are_refused(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for settings in ((), ("devices=3",), ("devices=2", "nodes=2")):
        with pytest.raises(ValueError, match="torchrun has started 2 processes, and devices= and nodes= are"):
            _cluster(options(corpus, tmp_path, *settings))
    assert _cluster(options(corpus, tmp_path, "devices=2")) == _cluster(options(corpus, tmp_path, "nodes=2")) == []
    with pytest.raises(ValueError, match="torchrun has started"):
        train(options(corpus, tmp_path / "exp"))
    assert not (tmp_path / "exp").exists()


def test_statistics_are_those_of_a_part_of_a_large_training_set(corpus, tmp_path, monkeypatch):
    read = []

    def recorded(cuts):
        for cut, sound in iterate(cuts):
            read.append(torch.from_numpy(sound)[None])
            yield cut, sound

    monkeypatch.setattr("asr.training.trainer.iterate", recorded)
    monkeypatch.setattr("asr.training.trainer.STATISTICS_SECONDS", 3.0)
    front_end = FrontEnd(FeatureConfig())
    set_statistics(front_end, SoundData(options(corpus, tmp_path).data, seed=1))
    seconds = [sound.shape[1] / SAMPLE_RATE for sound in read]
    assert sum(seconds[:-1]) <= 3.0 < sum(seconds)
    X = torch.cat([front_end(sound, torch.tensor([sound.shape[1]]))[0] for sound in read], dim=1)[0]
    torch.testing.assert_close(X.mean(dim=0), torch.zeros(80), atol=1e-3, rtol=0)
    torch.testing.assert_close(X.std(dim=0), torch.ones(80), atol=0.02, rtol=0)


def test_a_resumed_training_draws_into_its_run_of_wandb(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "wandb", MagicMock(run=None))
    monkeypatch.setattr("asr.training.trainer.WandbLogger", lambda name, out, version, **_: version)
    (_, first), (_, resumed), (_, anew) = (_loggers("speech", tmp_path, resume) for resume in (False, True, False))
    assert first == resumed != anew and first.startswith(str(tmp_path).strip("/").replace("/", "-"))


def test_a_training_ends_the_run_of_wandb_of_the_one_before(tmp_path, monkeypatch):
    wandb = MagicMock(run="of the one before")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    monkeypatch.setattr("asr.training.trainer.WandbLogger", lambda *_, **__: wandb.finish.call_count)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    assert _loggers("speech", tmp_path, False)[1] == 1
