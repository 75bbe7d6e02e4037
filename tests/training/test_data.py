import json
import os
import signal
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import soundfile
import torch
from lhotse import CutSet

from asr.audio.augment import change_speed
from asr.audio.reading import SAMPLE_RATE
from asr.corpus import open_corpus
from asr.corpus.shards import write_shards
from asr.corpus.utterances import NAMED
from asr.training.batches import LABELS, Bucket, EpochOrder, SpeechDataset, TimedLoader, make_buckets
from asr.training.building import build_model, build_tokenizer
from asr.training.conditions import Conditions
from asr.training.config import DataConfig, SoundConfig
from asr.training.data import SpeechData, memory_lengths
from asr.training.memory import largest_sizes
from asr.training.resuming import Resumable
from asr.training.run import train
from tests.training.tones import fitted, options, write_corpus


def test_buckets_share_the_sound_and_keep_to_the_batch():
    durations = np.random.default_rng(0).gamma(4, 2, 3000).clip(0.5, 20).tolist()
    buckets = make_buckets(durations, 80)
    assert len(buckets) == 20
    assert buckets[-1].seconds == max(durations)
    edges = np.array([bucket.seconds for bucket in buckets])
    sizes = np.bincount(np.searchsorted(edges, durations))
    for bucket, size in zip(buckets, sizes, strict=True):
        most = int(80 / bucket.seconds)
        batches = -(-size // most)
        assert bucket.utterances <= most and -(-size // bucket.utterances) == batches
        assert bucket.utterances * batches - size < batches  # the last batch is nearly as full as the others
    sound = np.bincount(np.searchsorted(edges, durations), weights=durations)
    assert np.ptp(sound) < 2 * max(durations)
    padded = edges[np.searchsorted(edges, durations)].sum()
    assert sum(durations) / padded > 0.92


def test_little_sound_has_few_buckets():
    assert make_buckets([1.0, 3.0, 2.0], 10) == [Bucket(3.0, 3)]
    assert make_buckets([30.0], 10) == [Bucket(30.0, 1)]
    assert make_buckets([2.0] * 96, 10) == [Bucket(2.0, 5)]
    assert len(make_buckets(np.linspace(1, 3, 55).tolist(), 10)) == 5  # 110 s, about two batches per bucket


def test_the_batches_of_an_epoch_are_counted_without_drawing_them(corpus, tmp_path):
    for seconds in (4, 10, 60):
        limits = (f"data.{name}={seconds}" for name in ("batch_seconds", "global_batch_seconds"))
        data = fitted(options(corpus, tmp_path, "data.max_seconds=2", *limits))
        for epoch in (0, 3):
            sampler = data._train_sampler(world_size=1, rank=0)
            sampler.set_epoch(epoch)
            assert data.batches_per_epoch() == sum(1 for _ in sampler)


LIBRISPEECH_960, SMALL = (300, 4800), (120, 360)  # data.batch_seconds and data.global_batch_seconds of experiments


@pytest.mark.parametrize(
    ("limits", "devices", "each"),
    [
        *((LIBRISPEECH_960, *on) for on in ((1, 300), (8, 300), (16, 300), (20, 240), (64, 75), (400, 30))),
        # on two devices, two batches each rather than one and a half full ones
        *((SMALL, *on) for on in ((1, 120), (2, 90), (3, 120), (4, 90), (5, 72), (16, 30))),
    ],
)
def test_an_update_has_what_is_asked_for_on_any_number_of_devices(limits, devices, each):
    """Unless a batch would be too short for the longest utterance."""
    batch, update = limits
    config = SoundConfig(["a"], ["b"], max_seconds=30, batch_seconds=batch, global_batch_seconds=update)
    count, seconds = config.shared_by(devices)
    assert seconds == each
    assert count * devices * each == update or each == config.max_seconds


@pytest.mark.parametrize(
    ("longest", "batch", "update", "devices", "expected"),
    [
        (30, 30.4, 91.2, 3, (1, 30.4)),  # 91.2 / (3 x 30.4) is 1.0000000000000002
        (30, 120, 121, 1, (1, 120)),  # one second more splits no batch
        (35, 40, 50, 1, (1, 40)),  # closer to 50 than two batches of 35
        (35, 40, 420, 8, (1, 40)),
        (30, 120, 360, 16, (1, 30)),
    ],
)
def test_an_update_that_does_not_divide_is_as_near_as_batches_allow(longest, batch, update, devices, expected):
    config = SoundConfig(["a"], ["b"], max_seconds=longest, batch_seconds=batch, global_batch_seconds=update)
    count, seconds = config.shared_by(devices)
    assert (count, seconds) == (expected[0], pytest.approx(expected[1]))


@pytest.fixture
def data(larger, tmp_path) -> SpeechData:
    return fitted(options(larger, tmp_path, "data.speeds=[1.0]"))


def test_the_batches_of_a_bucket_have_one_shape(data):
    sampler = data._train_sampler(world_size=1, rank=0)
    dataset = data._loader(sampler, [1.0], data.buckets).dataset
    batches = [dataset[cuts, seed] for seed, cuts in enumerate(sampler)]
    assert sum(len(batch.texts) for batch in batches) == 60
    seconds = [round(batch.inputs.shape[1] / 16000, 4) for batch in batches]
    assert set(seconds) == {round(bucket.seconds, 4) for bucket in data.buckets}
    for bucket in data.buckets:  # all but the last batch of a bucket are full
        sizes = [len(batch.texts) for batch, s in zip(batches, seconds, strict=True) if s == round(bucket.seconds, 4)]
        assert sorted(sizes, reverse=True)[:-1] == [bucket.utterances] * (len(sizes) - 1)
    for batch in batches:
        assert batch.Y.shape[1] % LABELS == 0 and batch.Y.shape[1] - batch.Y_lens.max() < LABELS
        beyond = torch.arange(batch.inputs.shape[1]) >= batch.lens[:, None]
        assert not batch.inputs[beyond].any()
        assert not batch.Y[torch.arange(batch.Y.shape[1]) >= batch.Y_lens[:, None]].any()


@pytest.mark.parametrize("speed", [0.8, 0.805, 1.25])
def test_a_window_is_of_the_sound_as_it_is_played(larger, tmp_path, speed):
    """Slowed with the silence after it, a batch would be longer than its window, beyond the positions."""
    window = ["features.kind=whisper", "features.pad_seconds=3", "model.positions=learned", "model.max_positions=74"]
    config = options(larger, tmp_path, *window, f"data.speeds=[{speed}]")
    data = SpeechData(config.data, config.seed)
    model = build_model(config, build_tokenizer(config.tokenizer, data.texts()))
    data.fit_to(model)
    assert {round(size.seconds, 2) for size in largest_sizes(data)} == {3.0}
    for batch in data.train_dataloader():
        samples, lens = change_speed(batch.inputs, batch.lens, batch.speed)
        assert lens.max() < 3 * SAMPLE_RATE and model.front_end(samples, lens)[0].shape[1] == 300
        assert model(samples, lens, batch.Y, batch.Y_lens).memory.shape[1] == 74


@pytest.mark.parametrize("workers", [0, -1])
def test_a_loop_of_ones_own_needs_no_trainer(larger, tmp_path, workers):
    data = fitted(options(larger, tmp_path, f"data.workers={workers}"))
    loader, said = data.train_dataloader(), []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        said.append([text for batch in loader for text in batch.texts])
    assert sorted(said[0]) == sorted(said[1]) == sorted(data.transcripts()) and said[0] != said[1]


def test_some_utterances_have_been_through_a_codec_and_the_same_ones_each_time(data):
    cuts = next(iter(data._train_sampler(world_size=1, rank=0)))
    clean, some, again, all_of_them = (
        data._loader(None, [1.0], data.buckets, Conditions(replace(data.config, codec=codec))).dataset[cuts, 5]
        for codec in (0.0, 0.5, 0.5, 1.0)
    )
    assert torch.equal(some.inputs, again.inputs) and torch.equal(some.lens, clean.lens)
    same = [(x.inputs == clean.inputs).all(dim=1).sum() for x in (some, all_of_them)]
    assert 0 < same[0] < len(clean.lens) and same[1] == 0


def test_a_file_that_is_gone_is_named_and_not_each_batch_that_it_was_of(data, tmp_path, caplog):
    dataset, cuts = data._loader(None, [1.0], data.buckets).dataset, list(data.train_cuts)[:14]
    for cut in cuts[:12]:
        cut.recording.sources[0].source = str(tmp_path / "gone.wav")
    for _ in range(2):
        for first in range(0, 14, 2):
            dataset[CutSet.from_cuts(cuts[first : first + 2]), 1]
    assert caplog.text.count("no such file") == NAMED and "utterances left out" not in caplog.text


def test_the_batches_of_an_update_have_one_shape_on_all_devices(larger, tmp_path):
    """No device waits for another: the batches are from one bucket, except leftovers, and played at one speed."""
    config = options(larger, tmp_path, "data.speeds=[0.9,1.0,1.1]")
    data = fitted(config)
    of_each = [list(Resumable(data._train_sampler(world_size=2, rank=rank), data.seed)) for rank in (0, 1)]
    dataset = data._loader(None, config.data.speeds, data.buckets).dataset
    steps = [[dataset[batch] for batch in step] for step in zip(*of_each, strict=True)]
    assert len({batch.speed for step in steps for batch in step}) == 3
    assert len({batch.inputs.shape[1] for step in steps for batch in step}) > 1
    assert all(one.speed == other.speed for one, other in steps)
    alike = [one.inputs.shape[1] == other.inputs.shape[1] for one, other in steps]
    assert all(alike[: len(steps) // 2])


def test_each_epoch_has_every_cut_in_an_order_of_its_own(data):
    order = EpochOrder(data.train_cuts, seed=1)
    first = [cut.id for cut in order]
    assert first == [cut.id for cut in order]
    order.epoch = 1
    second = [cut.id for cut in order]
    assert first != second and sorted(first) == sorted(second) == sorted(cut.id for cut in data.train_cuts)


def test_shards_are_shuffled_as_a_whole(data, tmp_path):
    order = EpochOrder(write_shards(data.train_cuts, tmp_path / "shards", size=7), seed=1)
    shards = []
    for epoch in range(3):
        order.epoch = epoch
        shards.append([cut.custom["shard"] for cut in order])
        changes = sum(a != b for a, b in pairwise(shards[-1]))
        assert changes == len(set(shards[-1])) - 1 == 8  # 60 cuts in nine shards
    assert len(set(map(tuple, shards))) == 3


def test_batches_are_drawn_at_random_within_a_shard_too(data, tmp_path):
    data.train_cuts = write_shards(data.train_cuts, tmp_path / "shards", size=60)
    places = {cut.id: i for i, cut in enumerate(data.train_cuts)}  # in the only shard
    batches = [[places[cut.id] for cut in cuts] for cuts in data._train_sampler(world_size=1, rank=0)]
    assert sum(batch != sorted(batch) for batch in batches) > 1


def test_shards_have_the_utterances_of_the_files(data, tmp_path):
    write_shards(data.train_cuts, tmp_path / "shards", size=7)
    batches = {}
    for name, cuts in (("files", data.train_cuts), ("shards", open_corpus(tmp_path / "shards"))):
        data.train_cuts = cuts
        sampler = data._train_sampler(world_size=1, rank=0)
        sampler.set_epoch(2)
        dataset = data._loader(sampler, [1.0], data.buckets).dataset
        sounds = (zip(batch.texts, batch.inputs, strict=True) for batch in (dataset[cuts, 0] for cuts in sampler))
        batches[name] = sorted((text, x.tolist()) for batch in sounds for text, x in batch)
    assert batches["files"] == batches["shards"]


def test_what_the_encoder_has_no_positions_for_is_left_out(corpus, tmp_path, caplog):
    config = options(corpus, tmp_path, "epochs=1", "model.positions=learned", "model.max_positions=22")
    data = SpeechData(config.data, seed=1)
    model = build_model(config, build_tokenizer(config.tokenizer, data.texts()))

    def most(cuts, speed):
        return max(memory_lengths(cuts, speed, model.front_end, model.transformer.encoder).values())

    slowest = min(config.data.speeds)
    assert most(data.train_cuts, slowest) > 22
    data.fit_to(model)
    assert most(data.train_cuts, slowest) <= 22
    assert most(data.dev_cuts, 1.0) <= 22 < most(data.dev_cuts, slowest)  # dev is played as it is
    assert "encoder frames are more than model.max_positions=22" in caplog.text
    train(config)


def test_what_a_file_has_beyond_what_it_is_said_to_have_goes_past_no_bucket(data, tmp_path):
    for name, seconds in (("a", 1.06), ("b", 0.9)):
        soundfile.write(tmp_path / f"{name}.wav", np.full(round(seconds * 16000), 0.1), 16000)
    said = [{"audio_filepath": f"{name}.wav", "duration": d, "text": "low"} for name, d in (("a", 1.0), ("b", 0.9))]
    (tmp_path / "rounded.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said))
    cuts = open_corpus(tmp_path / "rounded.jsonl")
    for buckets in ([Bucket(1.0, 2)], [Bucket(0.9, 1), Bucket(1.0, 1)]):  # a dev batch may span several buckets
        batch = data._loader([], [1.0], buckets).dataset[cuts, 1]
        assert batch.inputs.shape == (2, 16000)
        assert sorted(batch.lens.tolist()) == [14400, 16000]


def test_matrices_are_padded_to_the_frames_of_their_bucket(tmp_path):
    for name, frames in (("a", 150), ("b", 90)):
        np.save(tmp_path / f"{name}.npy", np.ones((frames, 7), np.float32))
        (tmp_path / f"{name}.txt").write_text("one")
    batch = SpeechDataset(None, [1.0], [Bucket(2.0, 2)])[open_corpus(tmp_path), 1]
    assert batch.inputs.shape == (2, 200, 7)
    assert sorted(batch.lens.tolist()) == [90, 150]


def test_transcripts_that_the_tokenizer_cannot_write_are_counted(corpus, tmp_path, caplog):
    train(options(corpus, tmp_path / "a", "epochs=1", "validate_every=1"))
    assert "cannot write" not in caplog.text
    manifest = tmp_path / "strange.jsonl"
    sound = sorted((corpus / "train").glob("*.wav"))
    texts = ["s\u00fc\u00df", *["low"] * (len(sound) - 1)]
    rows = ({"audio_filepath": str(path), "text": text} for path, text in zip(sound, texts, strict=True))
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    begun = (f"init_from={tmp_path / 'a' / 'model'}", f"data.train=[{manifest}]", "data.normalizer=neutral")
    train(options(corpus, tmp_path / "b", "epochs=1", "validate_every=1", *begun))
    assert "1 transcripts have characters that the tokenizer cannot write, as in 's\u00fc\u00df'" in caplog.text


def test_workers_give_way_to_training_and_read_on_where_all_processes_are_told_to_end(corpus, tmp_path):
    data = fitted(options(corpus, tmp_path, "data.workers=1", "data.batch_seconds=5", "data.max_seconds=5"))
    sampler = Resumable(data._train_sampler(world_size=1, rank=0))
    loader = data._loader(sampler, [1.0], data.buckets)
    batches = iter(loader)
    first = next(batches)
    worker = loader._iterator._workers[0].pid
    if hasattr(os, "SCHED_IDLE"):
        assert os.sched_getscheduler(worker) == os.SCHED_IDLE
    os.kill(worker, signal.SIGTERM)
    assert len(first.lens) + sum(len(batch.lens) for batch in batches) == len(data.train_cuts)


def test_what_the_normaliser_rewrites_unasked_is_said(tmp_path, caplog):
    write_corpus(tmp_path / "c", 2, seed=1)
    for path, text in zip(sorted((tmp_path / "c").glob("*.txt")), ("Über 25 Straßen", "plain words"), strict=True):
        path.write_text(text)
    corpus = {name: [str(tmp_path / "c")] for name in ("train", "dev")}
    SpeechData(DataConfig(**corpus), seed=1)
    SpeechData(DataConfig(**corpus), seed=1, inherited="english")
    said = "rewrites 1 of 2 transcripts, as 'Über 25 Straßen', which becomes 'uber twenty"
    assert f"english, the default, {said}" in caplog.text and f"tokenizer is kept, {said}" in caplog.text
    caplog.clear()
    for normalizer in ("english", "neutral"):
        SpeechData(DataConfig(**corpus, normalizer=normalizer), seed=1)
    assert "rewrites" not in caplog.text


class Slow(torch.utils.data.Dataset):
    def __getitem__(self, i: int) -> int:
        time.sleep(0.02)
        return i


class SlowToBegin(torch.utils.data.Sampler):
    def __iter__(self):
        time.sleep(0.1)
        return iter(range(5))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_counts_the_time_for_which_it_is_waited_and_no_other(workers):
    loader = TimedLoader(Slow(), sampler=SlowToBegin(), batch_size=None, num_workers=workers)
    began = time.monotonic()
    for epoch in (1, 2):
        for i, batch in enumerate(loader):
            assert batch == i
            time.sleep(0.03)
        least = 0.12 if workers else 0.2  # a worker reads the others while the first are used
        assert epoch * least <= loader.waited <= time.monotonic() - began - epoch * 0.15
