import numpy as np
import pytest
import torch

from asr.training.batches import LABELS, Bucket, make_buckets
from asr.training.building import build_model, build_tokenizer
from asr.training.data import SpeechData
from tests.training.test_training import corpus, options  # noqa: F401 (a fixture)


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
        assert bucket.utterances * batches - size < batches  # the last is nearly as full as the others
    sound = np.bincount(np.searchsorted(edges, durations), weights=durations)
    assert np.ptp(sound) < 2 * max(durations)
    padded = edges[np.searchsorted(edges, durations)].sum()
    assert sum(durations) / padded > 0.92


def test_little_sound_has_few_buckets():
    assert make_buckets([1.0, 3.0, 2.0], 10) == [Bucket(3.0, 3)]
    assert make_buckets([30.0], 10) == [Bucket(30.0, 1)]
    assert make_buckets([2.0] * 96, 10) == [Bucket(2.0, 5)]


@pytest.fixture
def data(corpus, tmp_path) -> SpeechData:  # noqa: F811
    config = options(corpus, tmp_path, "data.speeds=[1.0]")
    data = SpeechData(config.data, seed=1)
    data.fit_to(build_model(config, build_tokenizer(config.tokenizer, data.texts())))
    return data


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
        assert batch.Y.shape[1] % LABELS == 0
        beyond = torch.arange(batch.inputs.shape[1]) >= batch.lens[:, None]
        assert not batch.inputs[beyond].any()
        assert not batch.Y[torch.arange(batch.Y.shape[1]) >= batch.Y_lens[:, None]].any()
