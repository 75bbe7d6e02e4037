import gc
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from asr.text.tokenizer import CharTokenizer
from asr.training.building import build_model, build_tokenizer
from asr.training.data import SpeechData
from asr.training.memory import NOTHING, LargestFirst, Size, dummy_batch, largest_sizes, try_batch
from asr.training.module import SpeechTraining
from asr.training.run import train
from tests.training.tones import fitted, options


@pytest.fixture
def data(corpus, tmp_path) -> SpeechData:
    return fitted(options(corpus, tmp_path))


def test_no_batch_of_the_training_is_larger_than_the_largest_tried(data):
    tried = largest_sizes(data)
    assert tried[0].seconds == max(size.seconds for size in tried)  # the longest comes first
    slowest = 1 / min(data.config.speeds)
    dataset = data._loader(None, data.speeds, data.buckets).dataset
    for cuts in data._train_sampler(world_size=1, rank=0):
        seconds = slowest * max(cut.duration for cut in cuts)
        size = min((size for size in tried if size.seconds >= seconds - 1e-6), key=lambda size: size.seconds)
        utterances, labels = dataset[cuts, 1].Y.shape
        assert size.utterances >= utterances and size.labels >= labels


def test_matrices_are_not_played(tmp_path):
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", np.zeros((30, 12)))
        (tmp_path / f"{name}.txt").write_text("abc")
    corpora = [f"data.{part}=[{tmp_path}]" for part in ("train", "dev")]
    kind = ["features.kind=matrix", "features.dim=12", "model.subsampler=linear", "model.subsampling=1"]
    played, as_it_is = [], []
    for speeds, sizes in (("[0.5,2.0]", played), ("[1.0]", as_it_is)):
        data = fitted(options(tmp_path, tmp_path, *corpora, *kind, f"data.speeds={speeds}", "data.min_seconds=0"))
        sizes += largest_sizes(data)
    assert played == as_it_is


def test_of_texts_tokens_are_tried_and_no_more_than_have_positions(tmp_path):
    pairs = [f'{{"id": "{i}", "source": "{"low high " * (i % 6 + 2)}", "text": "low"}}' for i in range(40)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(pairs))
    kind = ["features.kind=text", "model.subsampler=embedding", "model.subsampling=1", "model.ctc=false"]
    config = options(
        *(tmp_path, tmp_path, f"data.train=[{tmp_path / 'pairs.jsonl'}]", f"data.dev=[{tmp_path / 'pairs.jsonl'}]"),
        *(*kind, "validation.ctc_weight=0", "data.min_seconds=0", "tokenizer.kind=bpe", "tokenizer.vocab_size=14"),
        *("model.positions=learned", "model.max_positions=46"),
    )
    data = SpeechData(config.data, seed=1)
    model = build_model(config, build_tokenizer(config.tokenizer, data.texts()))
    data.fit_to(model)
    longest = max(len(model.tokenizer.encode(cut.custom["source"])) for cut in data.train_cuts)
    assert longest < 46 < 100 * max(cut.duration for cut in data.train_cuts)  # duration counts characters
    tried = largest_sizes(data)
    assert longest <= round(100 * tried[0].seconds) < longest + 8
    module = types.SimpleNamespace(model=model, device=torch.device("cpu"))
    for size in (*tried, NOTHING):
        batch = dummy_batch(module, size)
        assert model.transformer(*model.front_end(batch.inputs, batch.lens), batch.Y, batch.Y_lens).lens.min() > 0


@pytest.mark.parametrize("takes", [[], ["features.kind=matrix", "features.dim=80"]])
def test_the_batch_of_a_process_without_one_has_positions(tmp_path, corpus, takes):
    config = options(corpus, tmp_path, *takes, "model.positions=learned", "model.max_positions=10")
    model = build_model(config, CharTokenizer("ab "))
    batch = dummy_batch(types.SimpleNamespace(model=model, device=torch.device("cpu")), NOTHING)
    assert 0 < model.transformer.encoder(*model.front_end(batch.inputs, batch.lens))[1].item() <= 10


def test_trying_changes_nothing(corpus, data, tmp_path, monkeypatch):
    without, _ = train(options(corpus, tmp_path / "without", "epochs=1", "model.dropout=0.1"))
    tried = []

    def try_on_a_cpu(callback, trainer, module):
        for size in (Size(4, 2.0, 12), Size(9, 0.8, 4)):
            try_batch(module, size)
            tried.append(size)

    monkeypatch.setattr(LargestFirst, "on_train_start", try_on_a_cpu)
    folder, _ = train(options(corpus, tmp_path / "with", "epochs=1", "model.dropout=0.1"))
    assert len(tried) == 2
    weights = [(f / "model.safetensors").read_bytes() for f in (without, folder)]
    assert weights[0] == weights[1]


def test_too_little_memory_is_told_before_the_first_update(corpus, tmp_path, monkeypatch):
    def full(self, batch):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(SpeechTraining, "losses", full)
    monkeypatch.setattr(LargestFirst, "on_train_start", lambda self, trainer, module: try_batch(module, Size(4, 30, 9)))
    with pytest.raises(ValueError, match=r"4 utterances of 30\.0 s .* data\.batch_seconds"):
        train(options(corpus, tmp_path / "exp", "epochs=1"))


@pytest.mark.parametrize(("state", "kept"), [({}, 2), ({"weight": {}}, 0)])
def test_the_optimisers_moments_have_room_while_batches_are_tried(data, monkeypatch, state, kept):
    module = torch.nn.Linear(1, 4321, bias=False, device="meta")
    module.device = torch.device("meta")
    trainer = types.SimpleNamespace(optimizers=[types.SimpleNamespace(state=state)])
    found = []

    def count(*_):
        tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
        found.append(sum(tensor.shape == module.weight.shape for tensor in tensors) - 1)

    monkeypatch.setattr("asr.training.memory.try_batch", count)
    LargestFirst(data).on_train_start(trainer, module)
    assert found and set(found) == {kept}


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_what_is_freed_stays_with_the_process_and_goes_back_now_and_then(programs):
    code = """
import types, torch
from pathlib import Path
from asr.training.memory import TRIM_EVERY, FreedMemory
module = types.SimpleNamespace(device=torch.device("cpu"))
def mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20
freed = FreedMemory()
freed.on_fit_start(None, module)
before = mib()
blocks = [torch.ones(2**20) for _ in range(64)]
last = torch.ones(2**20)  # the top of the heap
del blocks
kept = mib() - before
freed.on_train_batch_end(None, module, None, None, TRIM_EVERY - 1)
print(kept, mib() - before)
"""
    done = subprocess.run([programs / "python", "-c", code], capture_output=True, text=True, check=True)
    kept, left = map(float, done.stdout.split())
    assert kept > 200 and left < 50
