"""Two processes train as one does: the same global batch, no utterance twice, none missing."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from lhotse import CutSet
from lhotse.utils import fastcopy

from asr.training.batches import make_buckets
from asr.training.trainer import begin
from tests.training.tones import fitted, options

SETTINGS = ["epochs=4", "data.speeds=[1.0]", "data.batch_seconds=2", "data.max_seconds=2", "spec_augment.freq_masks=0"]
SETTINGS += ["spec_augment.time_masks=0", "precision=32-true", "model=tiny", "model.d_model=32", "model.dropout=0"]
SETTINGS += ["data.workers=0", "data.global_batch_seconds=4", "average=1", "validate_every=4", "optimizer.warmup=1"]
HALVES = ("data.batch_seconds=1", "data.max_seconds=1")


def write_eight(folder: Path) -> Path:
    """Writes eight utterances of one second, for one, two or four per batch, with transcripts of different lengths."""
    t = np.arange(16_000) / 16_000
    for i, word in enumerate(["low", "high"] * 4):
        hertz = (300.0 if word == "low" else 2000.0) + 50 * i
        soundfile.write(folder / f"{i}.wav", 0.3 * np.sin(2 * np.pi * hertz * t), 16_000)
        (folder / f"{i}.txt").write_text(word)
    return folder


@pytest.fixture
def eight(tmp_path) -> Path:
    return write_eight(tmp_path)


def command(corpus: Path, out: Path, *overrides: str) -> list[str]:
    data = [f"data.train=[{corpus}]", f"data.dev=[{corpus}]", f"out={out}"]
    return ["-m", "asr.train", *data, *SETTINGS, *overrides]


@pytest.fixture(scope="module")
def train(programs):
    """Runs a training: `train(corpus, out, *overrides)`."""

    def run(corpus: Path, out: Path, *overrides: str) -> subprocess.CompletedProcess:
        words = [programs / "python", *command(corpus, out, *overrides)]
        return subprocess.run(words, capture_output=True, timeout=240, text=True, cwd=out.parent)

    return run


def last_checkpoint(out: Path) -> dict:
    return torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)


def assert_same_weights(found: Path, wanted: Path, atol: float, keys_atol: float) -> None:
    """`keys_atol` is for the biases of keys, which change no attention weight: their gradient is rounding alone, and
    Adam makes whole steps of it."""
    found, wanted = (last_checkpoint(out)["state_dict"] for out in (found, wanted))
    assert found.keys() == wanted.keys()
    for name in wanted:
        most = keys_atol if name.endswith("key.bias") else atol
        torch.testing.assert_close(found[name], wanted[name], atol=most, rtol=0, msg=name)


STRATEGIES = ("ddp", "fsdp")  # each process has all the weights, or its share of them


def two(strategy: str) -> tuple[str, str]:
    return "devices=2", f"strategy={strategy}"


@pytest.fixture(scope="module")
def trained(train, tmp_path_factory) -> tuple[Path, dict[str, subprocess.CompletedProcess]]:
    """Trainings by two processes: their folder, with each under the name of its strategy, and how they ended."""
    folder = write_eight(tmp_path_factory.mktemp("two"))
    return folder, {name: train(folder, folder / name, *two(name), "validate_every=2") for name in STRATEGIES}


def epoch_losses(run: subprocess.CompletedProcess) -> list[float]:
    return [float(loss) for loss in re.findall(r"epoch \d/4: loss ([\d.]+)", run.stderr)]


def test_two_processes_arrive_where_one_does_at_once_or_by_halves(train, trained):
    folder, runs = trained
    runs = {"one": train(folder, folder / "one", "data.batch_seconds=4"), **runs}
    runs["one_by_halves"] = train(folder, folder / "one_by_halves")  # it accumulates gradients
    runs |= {
        f"{name}_by_halves": train(folder, folder / f"{name}_by_halves", *two(name), *HALVES) for name in STRATEGIES
    }
    for name, run in runs.items():
        assert run.returncode == 0, run.stderr
        assert last_checkpoint(folder / name)["global_step"] == 8
        assert_same_weights(folder / name, folder / "one", atol=2e-4, keys_atol=1e-3)
        assert run.stderr.count("epoch 4/4") == 1  # only the first process reports
        assert (folder / name / "model" / "model.safetensors").is_file()
        assert epoch_losses(run) == pytest.approx(epoch_losses(runs["one"]), abs=1.1e-3)  # printed with three decimals
    [final] = {run.stderr.splitlines()[-1].split(" (")[0] for run in runs.values()}
    assert final.startswith("dev WER")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the other process in /proc")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_when_a_process_is_killed_the_training_is_resumed_as_if_nothing_had_happened(
    train, trained, programs, strategy
):
    folder, _ = trained
    killed = folder / f"killed_{strategy}"
    words = [programs / "python", *command(folder, killed, *two(strategy), "validate_every=2")]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as caller:
        last = killed / "checkpoints" / "last.ckpt"
        while not last.exists() and caller.poll() is None:
            time.sleep(0.01)
        server = (programs / "pid").read_text()
        first, second = map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split())
        os.kill(second, signal.SIGKILL)
        time.sleep(0.5)
        with contextlib.suppress(ProcessLookupError):  # it may have ended on its own
            os.kill(first, signal.SIGKILL)
    assert not (killed / "model").exists()
    resumed = train(folder, killed, *two(strategy), "resume=true")
    assert resumed.returncode == 0, resumed.stderr
    assert_same_weights(killed, folder / strategy, atol=1e-6, keys_atol=1e-6)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the other process in /proc")
def test_processes_that_are_told_to_end_at_different_moments_end_together(trained, programs):
    folder, _ = trained
    out = folder / "told"
    words = [programs / "python", *command(folder, out, *two("ddp"), "epochs=2000", "validate_every=2000")]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as caller:
        while not (out / "checkpoints" / "last.ckpt").exists() and caller.poll() is None:
            time.sleep(0.01)
        server = (programs / "pid").read_text()
        for process in map(int, Path(f"/proc/{server}/task/{server}/children").read_text().split()):
            os.kill(process, signal.SIGTERM)
            time.sleep(0.05)
        said = caller.communicate(timeout=60)[1]
    assert caller.returncode == 143, said
    assert "ended by SIGTERM; resume=true continues" in said
    assert 0 < last_checkpoint(out)["global_step"] < 4000


@pytest.mark.skipif(not torch.cpu._is_avx512_bf16_supported(), reason="slow without bfloat16")
def test_shares_in_bfloat16_learn_what_whole_weights_do(train, trained):
    folder, _ = trained
    dev_losses = []
    for name in STRATEGIES:
        done = train(folder, folder / f"half_{name}", *two(name), "precision=bf16-mixed")
        assert done.returncode == 0, done.stderr
        dev_losses.append(float(re.search(r"epoch 4/4: .*dev loss ([\d.]+)", done.stderr)[1]))
    assert dev_losses[1] == pytest.approx(dev_losses[0], rel=0.02)


def test_what_was_begun_in_shares_goes_on_in_shares(trained):
    folder, _ = trained
    with pytest.raises(ValueError, match="was started with strategy=fsdp"):
        begin(options(folder, folder / "fsdp", "resume=true"))


def test_a_batch_that_cannot_be_read_stops_neither_process(train, eight, tmp_path):
    sound = (eight / "3.flac", eight / "3.wav")
    samples, rate = soundfile.read(sound[1])
    soundfile.write(sound[0], samples, rate)
    sound[1].unlink()
    content = sound[0].read_bytes()
    sound[0].write_bytes(content[:200] + bytes(len(content) - 200))  # the header does not reveal it
    done = train(eight, tmp_path / "exp", *two("fsdp"), *HALVES, "epochs=2", "validate_every=2")
    assert done.returncode == 0, done.stderr
    assert "3.flac" in done.stderr
    assert last_checkpoint(tmp_path / "exp")["global_step"] == 4


@pytest.mark.parametrize("epoch", [0, 1])
def test_an_epoch_has_every_utterance_once(corpus, tmp_path, epoch):
    data = fitted(options(corpus, tmp_path, "data.batch_seconds=5", "data.max_seconds=5"))
    seen = []
    for rank in range(3):
        sampler = data._train_sampler(world_size=3, rank=rank)
        sampler.set_epoch(epoch)
        seen.append([cut.id for cuts in sampler for cut in cuts])
    assert sorted(id for ids in seen for id in ids) == sorted(cut.id for cut in data.train_cuts)


def test_more_processes_than_utterances_share_them_in_as_many_batches_each(eight, tmp_path):
    data = fitted(options(eight, tmp_path, f"data.train=[{eight}]", f"data.dev=[{eight}]"))
    for sampler in (data._train_sampler, data._dev_sampler):
        ranks = [list(sampler(world_size=11, rank=rank)) for rank in range(11)]
        assert {len(batches) for batches in ranks} == {1}
        assert sorted(cut.id for batches in ranks for cuts in batches for cut in cuts) == [str(i) for i in range(8)]
        dataset = data._loader(None, [1.0], data.buckets).dataset
        assert sorted(len(dataset[cuts, 1].texts) for (cuts,) in ranks) == [0] * 3 + [1] * 8


@pytest.fixture
def of(eight, tmp_path):
    """Data of recordings of these durations, in seconds, in batches of up to 300 s."""
    data = fitted(options(eight, tmp_path, f"data.train=[{eight}]", f"data.dev=[{eight}]"))

    def of(durations: list[float]):
        cuts = (fastcopy(data.dev_cuts[0], id=str(i), duration=seconds) for i, seconds in enumerate(durations))
        data.train_cuts = data.dev_cuts = CutSet.from_cuts(cuts)
        data.batch_seconds, data.buckets = 300.0, make_buckets(durations, 300.0)
        return data

    return of


def test_what_is_left_at_the_end_of_an_epoch_fits_on_each_device_as_well(of):
    data = of(np.random.default_rng(1).exponential(5, 300).clip(0.1, 30).round(2).tolist())
    for sampler in (data._train_sampler, data._dev_sampler):
        ranks = [list(sampler(world_size=8, rank=rank)) for rank in range(8)]
        assert len({len(batches) for batches in ranks}) == 1
        together = [batch for batches in ranks for batch in batches]
        assert sorted(cut.id for batch in together for cut in batch) == sorted(cut.id for cut in data.train_cuts)
        for batch in filter(len, together):
            longest = max(cut.duration for cut in batch)
            assert len(batch) * longest <= 300
            if sampler == data._train_sampler:
                assert len(batch) <= next(bucket.utterances for bucket in data.buckets if bucket.seconds >= longest)


def test_a_recording_that_is_a_batch_by_itself_is_not_halved_in_place_of_others(of):
    sampler = of([300.0, *[2.0] * 10])._dev_sampler
    assert sorted(len(batch) for rank in range(3) for batch in sampler(world_size=3, rank=rank)) == [1, 5, 5]
