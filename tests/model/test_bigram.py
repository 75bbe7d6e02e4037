import math

import pytest
import torch
from safetensors.torch import save_file

from asr.model.bigram import DISCOUNT, FILE, Bigram
from asr.model.config import ModelConfig
from asr.model.folder import ModelError
from asr.model.speech_model import SpeechModel
from asr.text.tokenizer import EOS, SOS

CONFIG = ModelConfig(vocab_size=8)
TRANSCRIPTS = [[4, 5, 4], [4, 6]]


def test_absolute_discounting_gives_what_it_takes_to_the_single_tokens():
    """p(v | u) = max(c(u, v) - D, 0) / c(u) + D · kinds(u) / c(u) · p(v)."""
    log_probs = Bigram.of(TRANSCRIPTS, CONFIG).log_probs
    after_4 = {5: 1, EOS: 1, 6: 1}  # once each
    single = {4: 3, 5: 1, 6: 1, EOS: 2}  # how often each follows any token, 7 times in all
    for token in range(8):
        p = (single.get(token, 0) + 1) / (7 + 8)
        seen = max(after_4.get(token, 0) - DISCOUNT, 0) / 3
        assert log_probs[4, token].item() == pytest.approx(math.log(seen + DISCOUNT * 3 / 3 * p))


def test_it_is_a_distribution_after_every_token_those_never_seen_among_them():
    log_probs = Bigram.of(TRANSCRIPTS, CONFIG).log_probs
    assert log_probs.shape == (8, 8)
    torch.testing.assert_close(log_probs.exp().sum(1), torch.ones(8))
    assert log_probs[SOS].argmax() == 4
    torch.testing.assert_close(log_probs[7], log_probs[1])  # nothing is known of what follows them


def test_the_last_token_of_a_prompt_begins_a_transcript():
    log_probs = Bigram.of(TRANSCRIPTS, ModelConfig(vocab_size=8, prompt=(2, 7))).log_probs
    assert log_probs[7].argmax() == 4
    assert torch.equal(log_probs[SOS], log_probs[1])  # nothing is known of what follows either


def test_it_lives_in_the_model_folder(tmp_path, tiny_model):
    config = tiny_model.transformer.config
    tiny_model.transformer.bigram = Bigram.of(TRANSCRIPTS, config)
    tiny_model.save(tmp_path)
    loaded = SpeechModel.load(tmp_path).transformer.bigram
    assert torch.equal(loaded.log_probs, tiny_model.transformer.bigram.log_probs)
    tiny_model.transformer.bigram = None
    tiny_model.save(tmp_path)
    assert SpeechModel.load(tmp_path).transformer.bigram is None


def test_that_of_another_vocabulary_is_refused(tmp_path, tiny_model):
    tiny_model.save(tmp_path)
    Bigram.of([[31, 31, 31]], ModelConfig(vocab_size=99)).save(tmp_path)
    with pytest.raises(ModelError, match="not of 32 tokens"):
        SpeechModel.load(tmp_path)
    (tmp_path / FILE).write_bytes(b"nothing")
    with pytest.raises(ModelError):
        SpeechModel.load(tmp_path)
    save_file({"pairs": torch.tensor([1])}, tmp_path / FILE)
    with pytest.raises(ModelError):
        SpeechModel.load(tmp_path)
