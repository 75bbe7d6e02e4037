"""On another device than the CPU, everything stays there, is rarely waited for, and gives the same results."""

from collections import Counter
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import asr
from asr.audio.config import DistortionConfig, FeatureConfig, SpecAugmentConfig
from asr.decode.options import DecodeOptions
from asr.decode.search import search
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from asr.text.tokenizer import CharTokenizer
from asr.training.config import DataConfig, LossConfig, OptimizerConfig, TrainConfig
from asr.training.memory import Size, dummy_batch
from asr.training.module import SpeechTraining
from tests.conftest import LETTERS
from tests.elsewhere import DEVICE, elsewhere, move, waits
from tests.kinds import MODELS
from tests.test_shipped import SAMPLES

STRATEGIES = {
    "beam": {},
    "beam alone": {"lm_weight": 0.0, "ilm_weight": 0.0},
    "greedy": {"strategy": "greedy"},
    "drawn": {"strategy": "greedy", "temperature": 0.5},
    "ctc": {"strategy": "ctc"},
    "best path": {"strategy": "ctc", "beam_size": 1},
    "rescore": {"strategy": "rescore"},
}


@pytest.fixture(scope="module")
def here():
    """The shipped model on the CPU, after it has been used there."""
    recognizer = asr.load(precision="float32", word_times=True)
    recognizer.transcribe(SAMPLES[0])
    return recognizer


@pytest.fixture(scope="module")
def there(here):
    """The same recogniser, moved to `DEVICE`."""
    recognizer = deepcopy(here)
    with elsewhere():
        move(recognizer.model)
        move(recognizer.language_model)
    return recognizer


@pytest.mark.parametrize("options", STRATEGIES.values(), ids=STRATEGIES)
def test_every_search_finds_the_same_elsewhere(here, there, options, monkeypatch):
    found = []
    for recognizer, where in ((here, nullcontext), (there, elsewhere)):
        monkeypatch.setattr(recognizer, "options", replace(recognizer.options, **options))
        with where():
            transcripts = list(recognizer.transcribe_all(SAMPLES))
        found.append([(t.text, [word.start for word in t.segments[0].words]) for t in transcripts])
    assert found[1] == found[0]


def test_while_a_search_runs_elsewhere_it_is_waited_for_twice_in_eight_steps(here, there):
    (hypothesis,) = here.recognize([samples := next(here.pieces(SAMPLES[0])).samples])[0]
    with elsewhere():
        there.recognize([samples])
    per_line = Counter(waits)
    looks = per_line.pop("asr/decode/beam.py: count = int(done.sum())")
    past = per_line.pop("asr/model/cache.py: count = int(lives.sum(dim=1).max())")  # decoder's, language model's
    past += per_line.pop("asr/decode/ctc.py: begin, end = torch.stack(bounds).tolist()")
    looks += past / 3  # one after another, of which only the first waits
    assert 0 < looks <= 2 * (len(hypothesis.tokens) // 8 + 1)
    assert sum(per_line.values()) <= 9, per_line  # before the first step and after the last


@pytest.mark.parametrize(("features", "options"), MODELS.values(), ids=MODELS)
def test_every_model_writes_the_same_elsewhere(tiny_config, features, options):
    model = SpeechModel(features, Transformer(replace(tiny_config, **options)), CharTokenizer(LETTERS)).eval()
    inputs = {"sound": torch.randn(2, 8000), "matrix": torch.randn(2, 30, 80), "text": torch.randint(4, 32, (2, 9))}
    X, lens = inputs[features.takes], torch.tensor([inputs[features.takes].shape[1], 8])
    decoding = DecodeOptions(beam_size=3) if model.transformer.ctc else DecodeOptions(beam_size=3, ctc_weight=0.0)
    transformer = model.transformer
    found = [search(transformer, *transformer.encoder(*model.front_end(X, lens)), decoding)]
    with elsewhere():
        move(model)
        memory, lens = transformer.encoder(*model.front_end(X.to(DEVICE), lens.to(DEVICE)))
        found.append(search(transformer, memory, lens, decoding))
    for ours, theirs in zip(*([best[0] for best in each] for each in found), strict=True):
        assert theirs.tokens == ours.tokens
        assert theirs.score == pytest.approx(ours.score, rel=1e-4)


LOSSES = {
    "plain": LossConfig(),
    "consistency": LossConfig(consistency=0.2),
    "one layer": LossConfig(intermediate_ctc=0),
    "mwer": LossConfig(mwer=1.0),
}


KINDS = ("adamw", "muon")


@pytest.fixture
def trainings(tiny_config, request):
    """Two equal trainings of a random model on the CPU, the second to be moved, with everything that can be done to
    batches, but without dropout, which devices draw differently."""
    config = TrainConfig(
        data=DataConfig(train=["x"], dev=["x"]),
        distortion=DistortionConfig(0.5, 0.5, 0.5, 0.5, 0.5),
        spec_augment=SpecAugmentConfig(vocal_tract=0.1),
        out="x",
        **request.param,
    )
    transformer = Transformer(replace(tiny_config, dropout=0.0))
    model = SpeechModel(FeatureConfig(), transformer, CharTokenizer(LETTERS))
    training = SpeechTraining(config, model, 10).train()
    both = training, deepcopy(training)
    for each in both:  # no fused optimiser supports a device like this one
        each._trainer = SimpleNamespace(precision="16-mixed")
    return both


@pytest.mark.parametrize("trainings", [{"loss": loss} for loss in LOSSES.values()], ids=LOSSES, indirect=True)
def test_losses_and_gradients_are_the_same_elsewhere(trainings):
    here, there = trainings
    batch = dummy_batch(here, Size(utterances=3, seconds=1.5, labels=8))._replace(speed=0.9)
    with elsewhere():
        move(there)
        losses = []
        for training in trainings:
            moved = [x.to(training.device) if isinstance(x, torch.Tensor) else x for x in batch]
            torch.manual_seed(1)
            loss = training.losses(type(batch)(*moved)).total
            loss.backward()
            losses.append(loss.item())
        gradients = [p.grad.to("cpu") for p in there.parameters()]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for p, gradient in zip(here.parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "trainings", [{"optimizer": OptimizerConfig(kind=kind)} for kind in KINDS], ids=KINDS, indirect=True
)
def test_updates_are_the_same_elsewhere(trainings):
    here, there = trainings
    with elsewhere():
        move(there)
        optimizers = [training.configure_optimizers()["optimizer"] for training in trainings]
        for _ in range(2):
            for p, q in zip(here.parameters(), there.parameters(), strict=True):
                p.grad = torch.randn_like(p)
                q.grad = p.grad.to(DEVICE)
            for optimizer in optimizers:
                optimizer.step()
        moved = [p.detach().to("cpu") for p in there.parameters()]
    for p, q in zip(here.parameters(), moved, strict=True):
        torch.testing.assert_close(q, p.detach())


def test_what_mixes_devices_raises():
    with elsewhere(), pytest.raises(RuntimeError, match="two devices"):
        torch.ones(3, device=DEVICE) + torch.ones(3)
