"""Fine-tuning by low-rank adaptation: the result is a model folder like any other."""

import logging
from pathlib import Path

import pytest
import torch

from asr.model.speech_model import SpeechModel
from asr.training.building import adapt_model, load_origin
from asr.training.resuming import read_checkpoint
from asr.training.run import train
from tests.training.test_resuming import train_until_killed
from tests.training.tones import options


def tuned(corpus: Path, trained, out: Path, *settings: str) -> tuple[dict, dict, float]:
    """The weights before and after, and the dev WER after."""
    folder, wer = train(options(corpus, out, f"init_from={trained[0]}", "lora_rank=2", *settings))
    return SpeechModel.load(trained[0]).state_dict(), SpeechModel.load(folder).state_dict(), wer


def in_a_linear_layer(name: str, weight: torch.Tensor) -> bool:
    return ".layers." in name and weight.ndim == 2


@pytest.mark.parametrize("also", ["ema=0", "ema=0.9", "loss.mwer=1", "precision=bf16-mixed"])
def test_each_linear_layer_of_the_model_has_changed_by_a_matrix_of_that_rank(corpus, trained, tmp_path, caplog, also):
    caplog.set_level(logging.INFO)
    before, after, wer = tuned(corpus, trained, tmp_path, "epochs=1", also)
    assert before.keys() == after.keys() and wer <= trained[1] + 5
    for name, weight in before.items():
        changed = after[name] - weight
        if in_a_linear_layer(name, weight):
            *kept, beyond = torch.linalg.svdvals(changed)[:3]
            assert min(kept) > 10 * beyond and beyond < 1e-3 * kept[0], name
        else:
            assert not changed.any(), name
    learnt = sum(2 * sum(weight.shape) for name, weight in before.items() if in_a_linear_layer(name, weight))
    said = f"{learnt / 1e6:.2f} M of them trained"
    assert said in caplog.text and said in (tmp_path / "report.html").read_text()


def test_the_average_of_checkpoints_is_that_of_what_they_add(corpus, trained, tmp_path):
    before, after, _ = tuned(corpus, trained, tmp_path, "epochs=2", "validate_every=1")
    states = [read_checkpoint(path)["state_dict"] for path in sorted(tmp_path.glob("checkpoints/0*.ckpt"))]
    name = "transformer.encoder.layers.1.ffn.3"
    parts = [
        {part: state[f"model.{name}.parametrizations.weight.0.{part}"] for part in ("up", "down")} for state in states
    ]
    mean = sum(part["up"] @ part["down"] for part in parts) / 2
    assert len(states) == 2 and torch.linalg.matrix_rank(mean) > 2
    torch.testing.assert_close(after[f"{name}.weight"] - before[f"{name}.weight"], mean, atol=1e-6, rtol=1e-4)


def test_killed_within_an_epoch_it_goes_on_as_if_nothing_had_happened(corpus, trained, tmp_path, monkeypatch):
    settings = [f"init_from={trained[0]}", "lora_rank=2", "epochs=2", "validate_every=1"]
    whole, _ = train(options(corpus, tmp_path / "whole", *settings))
    train_until_killed(options(corpus, tmp_path / "parts", *settings), (1, 3), monkeypatch)
    parts, _ = train(options(corpus, tmp_path / "parts", *settings, "resume=true"))
    whole, parts = (SpeechModel.load(folder).state_dict() for folder in (whole, parts))
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())


def test_with_a_new_tokenizer_its_tokens_are_trained_whole(corpus, trained, tmp_path):
    settings = ["new_tokenizer=true", "tokenizer.kind=bpe", "tokenizer.vocab_size=20", "epochs=1"]
    config = options(corpus, tmp_path, f"init_from={trained[0]}", "lora_rank=2", *settings)
    _, after, _ = tuned(corpus, trained, tmp_path, *settings)
    began = adapt_model(load_origin(config), config, SpeechModel.load(tmp_path / "model").tokenizer).state_dict()
    names = ("ctc.weight", "ctc.bias", "decoder.embedding.weight", "decoder.output.weight", "decoder.output.bias")
    of_tokens = {f"transformer.{name}" for name in names}
    moved = {name: weight for name, weight in began.items() if not torch.equal(weight, after[name])}
    besides = {name for name, weight in moved.items() if not in_a_linear_layer(name, weight)}
    assert besides == of_tokens


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        (["lora_rank=2"], "lora_rank .* need init_from"),
        (["init_from=B", "lora_rank=-1"], "lora_rank must not be negative"),
        (["init_from=B", "lora_rank=2", "add_layers=1"], "lora_rank freezes all weights"),
        (["init_from=B", "lora_rank=2", "init_decoder_from=C"], "lora_rank freezes all weights"),
        (["init_from=B", "lora_rank=2", "optimizer.kind=muon"], "lora_rank goes with adamw"),
    ],
)
def test_what_does_not_go_with_it_is_refused(corpus, tmp_path, settings, what):
    with pytest.raises(ValueError, match=what):
        options(corpus, tmp_path, *settings)


def test_what_would_learn_nothing_is_refused(corpus, trained, tmp_path):
    nothing = ["freeze_layers=2", "loss.ctc_weight=1", "validation.strategy=ctc"]
    with pytest.raises(ValueError, match="leaves nothing to train"):
        tuned(corpus, trained, tmp_path, *nothing)
