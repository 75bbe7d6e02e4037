"""Expected word errors: their value, the direction of their gradient, and a training that minimises them."""

from dataclasses import replace

import pytest
import torch

from asr.audio.config import FeatureConfig
from asr.decode.options import DecodeOptions, Hypothesis
from asr.decode.scoring import word_errors
from asr.decode.search import search
from asr.model.config import ModelConfig
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from asr.text.tokenizer import CharTokenizer
from asr.training import minimum_wer
from asr.training.config import LossConfig
from asr.training.minimum_wer import expected_word_errors, joint_log_probs
from asr.training.run import train
from tests.training.tones import options

TEXTS = ["ab ba", "b", "a b a"]


KINDS = {
    "with CTC": {},
    "attention alone": {"ctc": False},
    "few positions": {"decoder_positions": "learned", "max_positions": 6},
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def model(request) -> SpeechModel:
    torch.manual_seed(3)
    tokenizer = CharTokenizer.train(["ab ba"])
    config = ModelConfig(
        vocab_size=len(tokenizer), d_model=16, num_heads=2, ffn_dim=32, encoder_layers=1, decoder_layers=1,
        subsampling_channels=4, dropout=0.0, **request.param,
    )  # fmt: skip
    return SpeechModel(FeatureConfig(), Transformer(config), tokenizer, "english")


@pytest.fixture
def batch(model) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    labels = [torch.tensor(model.tokenizer.encode(text)) for text in TEXTS]
    Y = torch.nn.utils.rnn.pad_sequence(labels, batch_first=True)
    return torch.randn(3, 120, 80), torch.tensor([120, 60, 90]), Y, torch.tensor([len(y) for y in labels])


def found(model: SpeechModel, X: torch.Tensor, X_lens: torch.Tensor):
    weight = DecodeOptions().ctc_weight if model.transformer.ctc else 0.0
    memory, lens = model.transformer.encoder(X, X_lens)
    return search(model.transformer, memory, lens, DecodeOptions(beam_size=4, nbest=4, ctc_weight=weight))


def test_hypotheses_weigh_what_the_search_says(model, batch):
    X, X_lens, Y, Y_lens = batch
    output = model.transformer(X, X_lens, Y, Y_lens)
    weight = DecodeOptions().ctc_weight if model.transformer.ctc else 0.0
    for b, hypotheses in enumerate(found(model.eval(), X, X_lens)):
        for hypothesis in hypotheses:
            y, row = torch.tensor([hypothesis.tokens], dtype=torch.int64), torch.tensor([b])
            score = joint_log_probs(model.transformer, output, row, y, torch.tensor([y.shape[1]]), weight)
            assert score.item() == pytest.approx(hypothesis.score, abs=1e-3)


def test_errors_are_expected_by_the_share_of_probability(model, batch):
    X, X_lens, Y, Y_lens = batch
    expected = 0.0
    for text, hypotheses in zip(TEXTS, found(model.eval(), X, X_lens), strict=True):
        shares = torch.tensor([hypothesis.score for hypothesis in hypotheses]).softmax(dim=0)
        wrong = [word_errors([text], [model.tokenizer.decode(each.tokens)]).edits for each in hypotheses]
        expected += (shares * torch.tensor(wrong)).sum().item()
    output = model.transformer(X, X_lens, Y, Y_lens)
    assert expected_word_errors(model, output, Y, Y_lens, 4).item() == pytest.approx(expected, rel=1e-3)


def test_its_gradient_moves_probability_to_the_better(model, batch, monkeypatch):
    X, X_lens, Y, Y_lens = (each[:2] for each in batch)
    ways = ("b a", "ab ba", "b"), ("b",)  # two wrong words, none, two; of the other utterance, none
    found = [[Hypothesis(model.tokenizer.encode(way), 0.0) for way in each] for each in ways]
    monkeypatch.setattr(minimum_wer, "search", lambda *arguments: found)
    optimizer = torch.optim.Adam(model.transformer.parameters(), lr=3e-3)
    expected = []
    for _ in range(40):
        optimizer.zero_grad()
        errors = expected_word_errors(model, model.transformer(X, X_lens, Y, Y_lens), Y, Y_lens, 3)
        errors.backward()
        optimizer.step()
        expected.append(errors.item())
    assert expected[-1] < 0.1 < 1 < expected[0]


def test_the_search_is_without_dropout_and_leaves_it_as_it_was(model, batch, monkeypatch):
    def without(transformer, *arguments):
        assert not any(module.training for module in transformer.modules())
        return search(transformer, *arguments)

    monkeypatch.setattr(minimum_wer, "search", without)
    X, X_lens, Y, Y_lens = batch
    for training in (True, False):
        model.train(training)
        expected_word_errors(model, model.transformer(X, X_lens, Y, Y_lens), Y, Y_lens, 2)
        assert all(module.training == training for module in model.modules())


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_trained_model_goes_on_by_its_word_errors(trained, corpus, tmp_path, precision):
    words = [f"init_from={trained[0]}", "loss.mwer=5", "optimizer.lr=1e-4", f"precision={precision}"]
    folder, wer = train(options(corpus, tmp_path / "exp", "epochs=1", *words))
    assert wer <= trained[1] + 5
    before, after = (SpeechModel.load(each).state_dict() for each in (trained[0], folder))
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_every_weight_learns_from_it(corpus, tmp_path, monkeypatch):
    """In half precision, where the search shares the copies of the weights."""
    from asr.training.module import SpeechTraining

    missing = []

    def look(self, optimizer):
        missing.extend(name for name, parameter in self.model.transformer.named_parameters() if parameter.grad is None)

    monkeypatch.setattr(SpeechTraining, "on_before_optimizer_step", look)
    settings = ["loss.mwer=1", "precision=bf16-mixed", "loss.intermediate_ctc=0"]
    train(options(corpus, tmp_path, "epochs=1", *settings))
    assert not missing


def test_what_cannot_be_is_refused(corpus, tmp_path):
    for wrong in ({"mwer": -1.0}, {"nbest": 1}):
        with pytest.raises(ValueError, match="loss.mwer must not be negative, loss.nbest at least 2"):
            LossConfig(**wrong)
    with pytest.raises(ValueError, match="loss.mwer decodes with all weights"):
        replace(options(corpus, tmp_path, "loss.mwer=1"), strategy="fsdp")
