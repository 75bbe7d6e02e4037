"""An encoder trained on audio only, and models that start from it; a decoder trained on text only."""

import re
from pathlib import Path

import pytest
import soundfile
import torch

from asr.audio.reading import SAMPLE_RATE
from asr.model.encoder_model import EncoderModel
from asr.model.folder import ModelError
from asr.model.language_model import LanguageModel, TextModel
from asr.model.speech_model import SpeechModel
from asr.training.building import adapt_model, build_model, build_tokenizer, load_origin, start_decoder
from asr.training.config import PretrainConfig
from asr.training.pretraining import Pretraining, pretrain
from asr.training.run import train
from tests.training.tones import compose_options, options

SHAPE = {"d_model": 32, "encoder_layers": 2, "subsampling_channels": 8, "dropout": 0}


def pretrain_options(sound: Path, out: Path, *overrides: str) -> PretrainConfig:
    settings = [
        "masked_prediction.codebooks=2",
        "masked_prediction.codes=32",
        "masked_prediction.mask_start=0.02",
        "masked_prediction.mask_frames=20",
        *(f"model.{name}={value}" for name, value in SHAPE.items()),
    ]
    return compose_options("pretrain", sound, out, [*settings, *overrides])


@pytest.fixture(scope="module")
def sound(larger, tmp_path_factory) -> Path:
    """The tones without their transcripts."""
    folder = tmp_path_factory.mktemp("sound")
    for part in ("train", "dev"):
        (folder / part).mkdir()
        for path in (larger / part).glob("*.wav"):
            (folder / part / path.name).write_bytes(path.read_bytes())
    return folder


@pytest.fixture(scope="module")
def pretrained(sound, tmp_path_factory) -> tuple[Path, float]:
    return pretrain(pretrain_options(sound, tmp_path_factory.mktemp("encoder"), "epochs=12", "validate_every=6"))


def test_the_encoder_learns_to_predict_what_is_hidden(sound, pretrained, tmp_path, caplog):
    caplog.set_level("INFO", "asr")
    _, at_first = pretrain(pretrain_options(sound, tmp_path / "first", "epochs=1", "optimizer.lr=1e-9"))
    assert re.search(r"epoch 1/1: loss [\d.]+, dev loss [\d.]+, dev accuracy [\d.]+ %; ", caplog.text)
    folder, loss = pretrained
    assert loss < 0.95 * at_first
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.json"}
    assert "dev loss" in (folder.parent / "report.html").read_text()
    assert (EncoderModel.load(folder).front_end.std != 1).all()  # it is the training set's


def test_an_update_of_few_batches_is_as_large_as_one_of_many(sound, tmp_path, monkeypatch):
    norms = []
    monkeypatch.setattr("asr.training.base.whole_norm", lambda norm: norms.append(float(norm)) or norm)
    settings = ["epochs=2", "optimizer.lr=1e-9", "data.batch_seconds=10", "data.global_batch_seconds=50"]
    pretrain(pretrain_options(sound, tmp_path, *settings))
    assert len(norms) == 4  # the second and the last have two batches instead of five
    assert min(norms) > 0.7 * max(norms)


def test_a_recogniser_begins_from_the_encoder_and_everything_else_is_new(corpus, pretrained, tmp_path):
    config = options(corpus, tmp_path, f"init_from={pretrained[0]}", "model.d_model=64", "model.decoder_layers=2")
    origin = EncoderModel.load(pretrained[0])
    tokenizer = build_tokenizer(config.tokenizer, ["low mid high"])
    model = adapt_model(load_origin(config), config, tokenizer)
    shape = model.transformer.config
    assert (shape.d_model, shape.encoder_layers, shape.decoder_layers) == (32, 2, 2)  # the decoder's depth is free
    assert shape.vocab_size == len(tokenizer) == model.transformer.ctc.out_features
    assert model.front_end.config == origin.front_end.config
    assert torch.equal(model.front_end.mean, origin.front_end.mean)
    for name, weight in origin.encoder.state_dict().items():
        assert torch.equal(model.transformer.encoder.state_dict()[name], weight)


def test_it_trains_on_and_its_lowest_layers_can_be_frozen(corpus, pretrained, tmp_path):
    settings = [f"init_from={pretrained[0]}", "freeze_layers=1", "epochs=1"]
    folder, _ = train(options(corpus, tmp_path / "exp", *settings))
    before, after = EncoderModel.load(pretrained[0]).encoder, SpeechModel.load(folder).transformer.encoder
    for name, weight in before.state_dict().items():
        frozen = name.startswith(("subsampling.", "layers.0."))
        assert torch.equal(weight, after.state_dict()[name]) == frozen, name
    resumed = [*settings, "resume=true", "epochs=2"]
    assert train(options(corpus, tmp_path / "exp", *resumed))[0] == folder


def test_an_interrupted_pre_training_goes_on_as_if_nothing_had_happened(sound, tmp_path, monkeypatch):
    settings = ("epochs=3", "save_minutes=0", "model.dropout=0.1")
    whole, _ = pretrain(pretrain_options(sound, tmp_path / "whole", *settings))
    step, steps = Pretraining.training_step, []

    def dies_in_the_second_epoch(module, batch):
        steps.append(batch)
        if len(steps) == 9:
            raise KeyError("killed")
        return step(module, batch)

    with monkeypatch.context() as patched, pytest.raises(KeyError):
        patched.setattr(Pretraining, "training_step", dies_in_the_second_epoch)
        pretrain(pretrain_options(sound, tmp_path / "parts", *settings))
    with pytest.raises(FileExistsError, match="resume=true"):
        pretrain(pretrain_options(sound, tmp_path / "parts", *settings))
    moved = (tmp_path / "parts").rename(tmp_path / "moved")
    again, _ = pretrain(pretrain_options(sound, moved, *settings, "resume=true"))
    first, second = (EncoderModel.load(folder).state_dict() for folder in (whole, again))
    assert all(torch.equal(second[name], weight) for name, weight in first.items())


@pytest.mark.parametrize("option", ["origin_share=0.5", "new_tokenizer=true", "lora_rank=2"])
def test_options_of_a_recogniser_do_not_go_with_an_encoder(corpus, pretrained, tmp_path, option):
    with pytest.raises(ValueError, match="is an encoder"):
        train(options(corpus, tmp_path, f"init_from={pretrained[0]}", option))


def test_a_folder_that_is_no_model_is_named(corpus, tmp_path):
    with pytest.raises(ModelError, match="not a model folder"):
        train(options(corpus, tmp_path / "exp", f"init_from={tmp_path}"))


def test_sound_too_short_is_left_out_by_name(sound, tmp_path, caplog):
    folder = tmp_path / "sound"
    folder.mkdir()
    for path in (sound / "train").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    soundfile.write(folder / "click.wav", torch.zeros(300).numpy(), SAMPLE_RATE)
    config = pretrain_options(sound, tmp_path / "exp", f"data.train=[{folder}]", "epochs=1", "data.min_seconds=0")
    pretrain(config)
    assert "left out click: it is too short" in caplog.text


def test_text_has_no_masked_prediction(sound, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"source": "one", "text": "un"}\n')
    words = [f"data.train=[{pairs}]", f"data.dev=[{pairs}]", "features.kind=text", "data.min_seconds=0"]
    with pytest.raises(ValueError, match=r"features\.kind=text"):
        pretrain(pretrain_options(sound, tmp_path / "exp", *words, "model.subsampler=embedding", "model.subsampling=1"))


@pytest.fixture
def text_model(corpus, tmp_path) -> tuple[Path, TextModel]:
    config = options(corpus, tmp_path, "model.decoder_layers=2")
    tokenizer = build_tokenizer(config.tokenizer, ["low mid high"])
    model = TextModel(LanguageModel(build_model(config, tokenizer).transformer.config), tokenizer)
    model.save(tmp_path / "lm")
    return tmp_path / "lm", model


def test_a_decoder_begins_as_the_language_model_it_is_started_from(corpus, text_model, tmp_path):
    _, origin = text_model
    model = build_model(options(corpus, tmp_path, "model.decoder_layers=2"), origin.tokenizer).eval()
    start_decoder(model, origin)
    Y = torch.randint(4, len(origin.tokenizer), (2, 5))
    decoder, language_model = model.transformer.decoder, origin.transformer.eval()
    memory, lens = torch.randn(2, 7, 32), torch.tensor([7, 4])
    got = decoder(decoder.prompted(Y), memory, lens)
    torch.testing.assert_close(got, language_model(language_model.prompted(Y)), atol=1e-5, rtol=1e-5)


def test_a_training_takes_its_tokenizer_from_the_language_model(corpus, text_model, tmp_path):
    folder, origin = text_model
    settings = [f"init_decoder_from={folder}", "model.decoder_layers=2", "epochs=1"]
    assert SpeechModel.load(train(options(corpus, tmp_path / "exp", *settings))[0]).tokenizer == origin.tokenizer


@pytest.mark.parametrize("kinds", [("sinusoidal", "rotary"), ("rotary", "sinusoidal"), ("rotary", "learned")])
def test_both_have_the_decoders_positions(corpus, tmp_path, kinds):
    words = ["model.decoder_layers=2", f"model.positions={kinds[0]}", f"model.decoder_positions={kinds[1]}"]
    config = options(corpus, tmp_path, *words)
    tokenizer = build_tokenizer(config.tokenizer, ["low mid high"])
    model = build_model(config, tokenizer).eval()
    TextModel(LanguageModel(model.transformer.config), tokenizer).save(tmp_path / "lm")
    origin = TextModel.load(tmp_path / "lm")
    start_decoder(model, origin)
    Y = torch.randint(4, len(tokenizer), (2, 5))
    decoder, memory, lens = model.transformer.decoder, torch.randn(2, 7, 32), torch.tensor([7, 4])
    wanted = origin.transformer(origin.transformer.prompted(Y))
    torch.testing.assert_close(decoder(decoder.prompted(Y), memory, lens), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("other", ["d_model=64", "decoder_layers=1", "num_heads=2", "activation=gelu"])
def test_a_language_model_of_another_shape_is_refused(corpus, text_model, tmp_path, other):
    words = [f"init_decoder_from={text_model[0]}", "model.decoder_layers=2", f"model.{other}"]
    with pytest.raises(ValueError, match=rf"init_decoder_from: model\.{other.split('=')[0]} is"):
        train(options(corpus, tmp_path / "exp", *words))


def test_an_encoder_can_be_given_a_window_and_the_decoder_its_own_limits(corpus, pretrained, tmp_path):
    window = ["model.attention_left=8", "model.attention_right=4", "model.ctc=false", "model.tokens_per_frame=3"]
    config = options(corpus, tmp_path, f"init_from={pretrained[0]}", *window)
    shape = adapt_model(load_origin(config), config, build_tokenizer(config.tokenizer, ["a"])).transformer.config
    assert shape.attention_window == (8, 4) and shape.tokens_per_frame == 3 and not shape.ctc


def test_a_table_of_positions_keeps_the_encoders_length(corpus, tmp_path):
    config = options(corpus, tmp_path, "model.positions=learned", "model.max_positions=300")
    EncoderModel(config.features, config.model).save(tmp_path / "encoder")
    config = options(corpus, tmp_path, f"init_from={tmp_path / 'encoder'}")
    model = adapt_model(load_origin(config), config, build_tokenizer(config.tokenizer, ["a"]))
    assert model.transformer.config.max_positions == 300
