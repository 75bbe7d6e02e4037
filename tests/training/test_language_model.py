"""A language model, from its training on text to its part in the search."""

import itertools
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from asr.audio.config import FeatureConfig
from asr.composition import build_config
from asr.decode.options import DecodeOptions
from asr.decode.recognizer import Recognizer
from asr.model.folder import ModelError
from asr.model.language_model import TextModel
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from asr.text.tokenizer import SOS, SPECIALS, CharTokenizer
from asr.training.building import adapt_language_model
from asr.training.config import LMTrainConfig
from asr.training.language_model import train_language_model
from asr.training.text import Batches
from tests.conftest import LETTERS
from tests.kinds import TINY
from tests.test_commands import call
from tests.training.tones import composed


def configured(folder: Path) -> LMTrainConfig:
    """The options for a language whose words are ab and cd in turn."""
    SpeechModel(FeatureConfig(), Transformer(TINY), CharTokenizer(LETTERS)).save(folder / "asr")
    lines = (" ".join(itertools.islice(itertools.cycle(["ab", "cd"]), n, 2 * n + 1)) for n in range(1, 13))
    (folder / "text.txt").write_text("\n".join(lines) + "\n")
    text = f"[{folder / 'text.txt'}]"
    small = ["model.d_model=32", "model.num_heads=2", "model.decoder_layers=1", "model.ffn_dim=64", "model.dropout=0"]
    words = [
        *(f"tokenizer={folder / 'asr'}", f"out={folder / 'lm'}", f"data.train={text}", f"data.dev={text}"),
        *("epochs=60", "optimizer.lr=1e-2", "optimizer.warmup=5", "data.batch_tokens=200", "precision=32-true"),
    ]
    return build_config(composed("train_lm", [*words, *small]))


@pytest.fixture
def config(tmp_path):
    return configured(tmp_path)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory) -> tuple[Path, float]:
    folder = tmp_path_factory.mktemp("learnt")
    _, perplexity = train_language_model(configured(folder))
    return folder / "lm", perplexity


@pytest.fixture
def trained(config, learnt):
    """A training that has ended, copied for each test."""
    shutil.copytree(learnt[0], config.out)
    return config, Path(config.out) / "model", learnt[1]


def test_every_epoch_has_an_order_of_its_own(config, monkeypatch):
    epochs = []
    monkeypatch.setattr(Batches, "set_epoch", lambda self, epoch: epochs.append(epoch))
    train_language_model(replace(config, epochs=3))
    assert set(epochs) >= {0, 1, 2}


def test_it_learns_the_language_and_is_found_in_its_folder(trained, tiny_model):
    config, folder, perplexity = trained
    assert perplexity < 1.6
    model = TextModel.load(folder)
    assert model.tokenizer == tiny_model.tokenizer
    tokens = model.tokenizer.encode("ab cd ab")
    with torch.inference_mode():
        log_probs = model.transformer(torch.tensor([[SOS, *tokens]]))[0]
    assert log_probs[6].exp()[model.tokenizer.encode("a")[0]] > 0.9
    with pytest.raises(FileExistsError, match="resume=true"):
        train_language_model(config)


def test_with_another_tokenizer_it_is_not_resumed(trained, tiny_config, tmp_path):
    config, *_ = trained
    SpeechModel(FeatureConfig(), Transformer(tiny_config), CharTokenizer(LETTERS[::-1])).save(tmp_path / "asr")
    with pytest.raises(ValueError, match="another tokenizer than when this training started"):
        train_language_model(replace(config, resume=True, epochs=61))


def test_a_warm_up_that_never_ends_is_said_and_how_small_the_training_is(config, caplog):
    caplog.set_level("INFO", "asr")
    train_language_model(replace(config, epochs=1, optimizer=replace(config.optimizer, warmup=300)))
    assert "the rate rises for all" in caplog.text
    assert re.search(r"12 lines, 270 tokens, 2 updates, \d,\d{3} parameters; for dev 12 lines", caplog.text)
    assert "hardly better than guessing among the 32 tokens" in caplog.text


def test_fewer_batches_than_processes_are_a_clear_error(config):
    few = replace(config, devices=2, data=replace(config.data, batch_tokens=10_000))
    with pytest.raises(ValueError, match="fewer batches than the 2 processes: lower data.batch_tokens"):
        train_language_model(few)


def test_it_goes_on_from_another(trained, tmp_path):
    config, folder, perplexity = trained
    still = replace(config.optimizer, lr=1e-9)
    further = replace(config, init_from=str(folder), out=str(tmp_path / "more"), epochs=1, optimizer=still)
    further.model = replace(further.model, d_model=64, dropout=0.5)  # the shape stays that of the initial model
    more, same = train_language_model(further)
    assert math.isclose(same, perplexity, rel_tol=1e-3)
    model = TextModel.load(more).transformer
    assert (model.config.d_model, model.config.dropout) == (32, 0.5)


def test_it_goes_on_deeper(trained, tmp_path):
    config, folder, perplexity = trained
    still, depth = replace(config.optimizer, lr=1e-9), TextModel.load(folder).transformer.config.decoder_layers
    further = replace(
        config, init_from=str(folder), out=str(tmp_path / "more"), epochs=1, optimizer=still, add_layers=1
    )
    more, same = train_language_model(further)
    assert math.isclose(same, perplexity, rel_tol=1e-3)
    assert len(TextModel.load(more).transformer.layers) == depth + 1
    with pytest.raises(ValueError, match=f"add_layers=9: there are {depth} layers"):
        train_language_model(replace(further, add_layers=9, out=str(tmp_path / "nine")))
    with pytest.raises(ValueError, match="needs init_from"):
        replace(config, add_layers=1)


def test_with_other_tokens_it_begins_as_what_wrote_them(trained, tiny_config):
    _, folder, _ = trained
    origin = TextModel.load(folder)
    tokenizer = CharTokenizer("db~ ")
    model = adapt_language_model(origin, replace(tiny_config, vocab_size=len(tokenizer)), tokenizer)
    for i in range(len(tokenizer)):
        theirs = origin.tokenizer.encode(tokenizer.decode([i]))[0] if i >= len(SPECIALS) else i
        same = torch.equal(model.embedding.weight[i], origin.transformer.embedding.weight[theirs])
        assert same == (tokenizer.piece(i) != "~")
    assert model.output.weight is model.embedding.weight
    for ours, theirs in zip(model.layers.parameters(), origin.transformer.layers.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_no_language_model_is_not_gone_on_from(config, tmp_path):
    with pytest.raises(ModelError, match="language_model"):
        train_language_model(replace(config, init_from=str(tmp_path / "asr")))


def test_a_perplexity_beyond_all_numbers_is_infinite(config):
    optimizer = replace(config.optimizer, lr=1000.0, warmup=1, clip=1e9)
    assert train_language_model(replace(config, epochs=2, optimizer=optimizer))[1] == math.inf


def test_it_takes_part_in_the_search(trained, tiny_model, noise_is_heard):
    _, folder, _ = trained
    sound = torch.randn(16_000).numpy() * 0.1
    options = DecodeOptions(lm_weight=20.0, nbest=2)
    with_lm = Recognizer(tiny_model, options, language_model=folder).transcribe(sound).text
    assert set(with_lm.split()) <= {"ab", "cd", "a", "c", "ab cd"}
    assert with_lm != Recognizer(tiny_model, options).transcribe(sound).text


def test_one_of_other_tokens_is_refused(trained, tiny_model):
    _, folder, _ = trained
    tiny_model.tokenizer = type(tiny_model.tokenizer)("xyz")
    with pytest.raises(ValueError, match="other tokens"):
        Recognizer(tiny_model, language_model=folder)


def test_its_steps_equal_the_full_forward_pass(tiny_config):
    from asr.model.language_model import LanguageModel

    model = LanguageModel(tiny_config).eval()
    with torch.inference_mode():
        Y_in = torch.randint(4, 32, (2, 3, 70))
        cache, steps = model.start(2, 3), []
        for t in range(70):
            log_probs, cache = model.step(Y_in[:, :, t], cache)
            steps.append(log_probs)
        whole = model(Y_in.flatten(0, 1)).view(2, 3, 70, -1)
        torch.testing.assert_close(torch.stack(steps, dim=2), whole, atol=1e-5, rtol=0)
    assert math.isclose(whole.exp().sum(-1).mean().item(), 1.0, abs_tol=1e-5)


def test_the_command_names_what_is_missing(tmp_path):
    done = call("asr.train_lm", f"out={tmp_path}", "data.train=[nowhere.txt]")
    assert done.returncode == 2
    assert done.stderr == b"asr.train_lm: tokenizer is missing: tokenizer=... gives it\n"
