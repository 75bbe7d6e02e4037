"""Where a training runs: devices, and the processes that a cluster has started."""

import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment

from asr.training.run import train
from asr.training.trainer import _cluster, device_count
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
