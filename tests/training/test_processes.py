"""Two processes train as one does: the same global batch, no utterance twice, none missing."""

import os
import subprocess
import sys
from pathlib import Path

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


@pytest.fixture
def eight(tmp_path, tone) -> Path:
    """Eight utterances of a second, two or four a batch; their transcripts are not equally long."""
    for i, word in enumerate(["low", "high"] * 4):
        soundfile.write(tmp_path / f"{i}.wav", tone(1.0, 300.0 + 50 * i if word == "low" else 2000.0 + 50 * i), 16_000)
        (tmp_path / f"{i}.txt").write_text(word)
    return tmp_path


def train(corpus: Path, out: Path, *overrides: str) -> subprocess.CompletedProcess:  # noqa: F811
    data = [f"data.train=[{corpus}]", f"data.dev=[{corpus}]", f"out={out}"]
    command = [sys.executable, "-m", "asr.train", *data, *SETTINGS, *overrides]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=out.parent, env=environment, capture_output=True, text=True, timeout=240)


def test_two_processes_arrive_where_one_does(eight, tmp_path):
    done = [
        train(eight, tmp_path / "one", "data.batch_seconds=4"),
        train(eight, tmp_path / "two", "devices=2", "strategy=ddp"),
    ]
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


def test_a_batch_that_cannot_be_read_stops_neither_process(eight, tmp_path):
    sound = (eight / "3.flac", eight / "3.wav")
    samples, rate = soundfile.read(sound[1])
    soundfile.write(sound[0], samples, rate)
    sound[1].unlink()
    content = sound[0].read_bytes()
    sound[0].write_bytes(content[:200] + bytes(len(content) - 200))  # its header says nothing of it
    done = train(eight, tmp_path / "exp", "devices=2", "strategy=ddp", "data.batch_seconds=1", "data.max_seconds=1")
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
