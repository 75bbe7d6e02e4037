"""Two processes train as one does: the same global batch, no utterance twice, none missing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file

from asr.training.building import build_model, build_tokenizer
from asr.training.data import SpeechData
from tests.conftest import ROOT
from tests.training.test_training import corpus, options  # noqa: F401 (a fixture)

SETTINGS = ["epochs=4", "data.speeds=[1.0]", "data.batch_seconds=2", "data.max_seconds=2", "spec_augment.freq_masks=0"]
SETTINGS += ["spec_augment.time_masks=0", "precision=32-true", "model=tiny", "model.d_model=32", "model.dropout=0"]
SETTINGS += ["data.workers=0", "data.global_batch_seconds=4", "average=1", "validate_every=4", "optimizer.warmup=1"]


def write_eight(folder: Path) -> Path:
    """Eight utterances of a second, two or four a batch; their transcripts are not equally long."""
    t = np.arange(16_000) / 16_000
    for i, word in enumerate(["low", "high"] * 4):
        hertz = (300.0 if word == "low" else 2000.0) + 50 * i
        soundfile.write(folder / f"{i}.wav", 0.3 * np.sin(2 * np.pi * hertz * t), 16_000)
        (folder / f"{i}.txt").write_text(word)
    return folder


@pytest.fixture
def eight(tmp_path) -> Path:
    return write_eight(tmp_path)


def command(corpus: Path, out: Path, *overrides: str) -> tuple[list[str], dict]:  # noqa: F811
    data = [f"data.train=[{corpus}]", f"data.dev=[{corpus}]", f"out={out}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    settings = {"cwd": out.parent, "env": environment, "text": True}
    return [sys.executable, "-m", "asr.train", *data, *SETTINGS, *overrides], settings


def train(*arguments) -> subprocess.CompletedProcess:
    words, settings = command(*arguments)
    return subprocess.run(words, capture_output=True, timeout=240, **settings)


TWO = ("devices=2", "strategy=ddp")


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    """A training by two processes: the folder it lies in, beside its corpus, and how it ended."""
    folder = tmp_path_factory.mktemp("two")
    return folder, train(write_eight(folder), folder / "two", *TWO)


def test_two_processes_arrive_where_one_does(two):
    tmp_path, done = two[0], [train(two[0], two[0] / "one", "data.batch_seconds=4"), two[1]]
    assert [run.returncode for run in done] == [0, 0], done[1].stderr
    steps = [
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True)["global_step"]
        for name in ("one", "two")
    ]
    assert steps == [8, 8]
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("one", "two"))
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-3, rtol=0, msg=name)
    final = [run.stderr.splitlines()[-1].split(" (")[0] for run in done]
    assert final[0] == final[1] and final[0].startswith("dev WER")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the other process in /proc")
def test_when_a_process_is_killed_the_training_is_resumed_as_if_nothing_had_happened(two):
    folder, _ = two
    words, settings = command(folder, folder / "killed", *TWO)
    with subprocess.Popen(words, stderr=subprocess.DEVNULL, **settings) as first:
        last = folder / "killed" / "checkpoints" / "last.ckpt"
        while not last.exists() and first.poll() is None:
            time.sleep(0.01)
        second = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        for process in second:
            os.kill(int(process), signal.SIGKILL)
        time.sleep(0.5)
        first.kill()
    assert second and not (folder / "killed" / "model").exists()
    resumed = train(folder, folder / "killed", *TWO, "resume=true")
    assert resumed.returncode == 0, resumed.stderr
    whole, parts = (load_file(folder / name / "model" / "model.safetensors") for name in ("two", "killed"))
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], atol=1e-6, rtol=0, msg=name)


def test_a_batch_that_cannot_be_read_stops_neither_process(eight, tmp_path):
    sound = (eight / "3.flac", eight / "3.wav")
    samples, rate = soundfile.read(sound[1])
    soundfile.write(sound[0], samples, rate)
    sound[1].unlink()
    content = sound[0].read_bytes()
    sound[0].write_bytes(content[:200] + bytes(len(content) - 200))  # its header says nothing of it
    done = train(eight, tmp_path / "exp", *TWO, "data.batch_seconds=1", "data.max_seconds=1")
    assert done.returncode == 0, done.stderr
    assert "3.flac" in done.stderr
    state = torch.load(tmp_path / "exp" / "checkpoints" / "last.ckpt", weights_only=True)
    assert state["global_step"] == 8


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_has_every_utterance_once(corpus, tmp_path, epoch):  # noqa: F811
    config = options(corpus, tmp_path, "data.batch_seconds=5", "data.max_seconds=5")
    data = SpeechData(config.data, seed=1)
    data.fit_to(build_model(config, build_tokenizer(config.tokenizer, data.texts())))
    seen = []
    for rank in range(3):
        sampler = data._train_sampler(world_size=3, rank=rank)
        sampler.set_epoch(epoch)
        seen.append([cut.id for cuts in sampler for cut in cuts])
    assert sorted(id for ids in seen for id in ids) == sorted(cut.id for cut in data.train_cuts)
