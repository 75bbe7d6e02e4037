import json
from itertools import chain

import pytest
import torch
from safetensors import SafetensorError

from asr.audio.config import FeatureConfig
from asr.model.bigram import Bigram
from asr.model.encoder_model import EncoderModel
from asr.model.folder import ModelError
from asr.model.foreign import import_model
from asr.model.language_model import LanguageModel, TextModel
from asr.model.speech_model import SpeechModel
from asr.text.tokenizer import CharTokenizer
from asr.training.building import load_origin
from asr.training.config import DataConfig, TrainConfig
from tests.test_readme import write_whisper


def test_a_model_travels_in_a_folder(tiny_model, tmp_path):
    tiny_model.front_end.set_statistics(torch.randn(80), torch.rand(80) + 0.5)
    tiny_model.save(tmp_path)
    loaded = SpeechModel.load(tmp_path)
    inputs = (torch.randn(1, 16_000), torch.tensor([16_000]), torch.randint(4, 32, (1, 5)), torch.tensor([5]))
    for ours, theirs in zip(tiny_model(*inputs)[:4], loaded(*inputs)[:4], strict=True):
        assert torch.equal(ours, theirs)
    assert loaded.tokenizer.characters == tiny_model.tokenizer.characters
    assert loaded.normalizer_name == "english"


def test_a_model_is_loaded_in_float32_whatever_type_torch_gives_new_tensors(tiny_model, tmp_path):
    tiny_model.transformer.bigram = Bigram.of([[4, 5]], tiny_model.transformer.config)
    tiny_model.save(tmp_path)
    write_whisper(tmp_path)
    torch.set_default_dtype(torch.float64)
    try:
        loaded = SpeechModel.load(tmp_path)
        imported = import_model(tmp_path / "tiny.en.pt", tmp_path / "gpt2.tiktoken")
        log_probs = loaded.transformer.bigram.log_probs
    finally:
        torch.set_default_dtype(torch.float32)
    tensors = chain(loaded.parameters(), loaded.buffers(), imported.parameters(), imported.buffers(), [log_probs])
    floats = [each for each in tensors if each.is_floating_point()]
    assert {each.dtype for each in floats} == {torch.float32}
    assert torch.equal(log_probs, tiny_model.transformer.bigram.log_probs)


def test_whom_the_umask_lets_reads_the_folder(tiny_model, tmp_path):
    (tmp_path / ".model.safetensors").touch(0o600)  # as a process that was killed leaves it
    tiny_model.save(tmp_path)
    (tmp_path / "other").touch()
    modes = {path.stat().st_mode for path in tmp_path.iterdir()}
    assert modes == {(tmp_path / "other").stat().st_mode}


def test_a_tokenizer_of_another_size_is_refused(tiny_model, tmp_path):
    tiny_model.save(tmp_path)
    CharTokenizer("abc").save(tmp_path)
    with pytest.raises(ModelError, match=r"the tokenizer has 7 tokens, the model 32"):
        SpeechModel.load(tmp_path)


def test_parts_that_do_not_fit_together_make_no_model(tiny_model):
    transformer, letters = tiny_model.transformer, tiny_model.tokenizer
    with pytest.raises(ValueError, match="the tokenizer has 7 tokens, the model 32"):
        SpeechModel(FeatureConfig(), transformer, CharTokenizer("abc"))
    with pytest.raises(ValueError, match="the tokenizer has 7 tokens, the model 32"):
        TextModel(LanguageModel(transformer.config), CharTokenizer("abc"))
    with pytest.raises(ValueError, match="features.dim=40, but model.input_dim=80"):
        SpeechModel(FeatureConfig(dim=40), transformer, letters)
    with pytest.raises(ValueError, match="features.dim=40, but model.input_dim=80"):
        EncoderModel(FeatureConfig(dim=40), transformer.config)


def test_a_loaded_model_can_be_trained_on(tiny_model, tmp_path):
    tiny_model.save(tmp_path)
    loaded = SpeechModel.load(tmp_path)
    assert [p.shape for p in loaded.parameters()] == [p.shape for p in tiny_model.parameters()]  # the output stays tied
    assert all(p.requires_grad and p.device.type == "cpu" for p in loaded.parameters())


def test_half_precision_on_disk_is_half_the_size_and_the_statistics_stay_exact(tiny_model, tmp_path):
    tiny_model.front_end.set_statistics(torch.randn(80), torch.rand(80) + 0.5)
    tiny_model.save(tmp_path / "full")
    tiny_model.save(tmp_path / "half", "float16")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("half", "full")]
    assert sizes[0] < 0.6 * sizes[1]
    loaded = SpeechModel.load(tmp_path / "half")
    assert next(loaded.parameters()).dtype == torch.float32
    assert torch.equal(loaded.front_end.mean, tiny_model.front_end.mean)


def test_int8_on_disk_is_a_quarter_of_the_size_and_half_a_step_of_each_row_away(tiny_model, tmp_path):
    tiny_model.save(tmp_path / "full")
    tiny_model.save(tmp_path / "int8", "int8")
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("int8", "full")]
    assert sizes[0] < 0.35 * sizes[1]
    loaded = dict(SpeechModel.load(tmp_path / "int8").named_parameters())
    for name, weight in tiny_model.named_parameters():
        of_a_row = weight.abs().flatten(1).amax(dim=1) / 127 if weight.dim() > 1 else weight.abs() * 2**-9
        step = of_a_row.view(-1, *[1] * (weight.dim() - 1))
        assert (loaded[name] - weight).abs().le(step * 0.501 + 1e-7).all(), name


def test_what_is_in_int8_stays_as_it_is_when_it_is_saved_again(tiny_model, tmp_path):
    tiny_model.save(tmp_path / "once", "int8")
    SpeechModel.load(tmp_path / "once").save(tmp_path / "twice", "int8")
    once, twice = (SpeechModel.load(tmp_path / name).state_dict() for name in ("once", "twice"))
    assert all(torch.allclose(twice[name], tensor, rtol=1e-6, atol=0) for name, tensor in once.items())


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "characters.json"])
def test_a_folder_without_a_part_is_no_model(tiny_model, tmp_path, missing):
    tiny_model.save(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ModelError, match=str(tmp_path)):
        SpeechModel.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [("model.safetensors", b"not weights"), ("characters.json", b"5"), ("sentencepiece.model", b"")],
)
def test_a_damaged_file_is_a_clear_error(tiny_model, tmp_path, name, content):
    tiny_model.save(tmp_path)
    if name == "sentencepiece.model":
        (tmp_path / "characters.json").unlink()
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError, match="not a model that this version can read"):
        SpeechModel.load(tmp_path)


def test_weights_of_another_shape_are_named(tiny_model, tmp_path):
    tiny_model.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model"]["ffn_dim"] *= 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"size mismatch for .*ffn.*: copying a param with shape"):
        SpeechModel.load(tmp_path)


def test_a_folder_of_another_kind_is_called_what_it_is(tiny_model, tmp_path):
    config = tiny_model.transformer.config
    tiny_model.save(tmp_path / "recogniser")
    TextModel(LanguageModel(config), tiny_model.tokenizer).save(tmp_path / "lm")
    EncoderModel(tiny_model.front_end.config, config).save(tmp_path / "encoder")
    with pytest.raises(ModelError, match=r"lm: this is a language model \(asr.train_lm\), not a recogniser$"):
        SpeechModel.load(tmp_path / "lm")
    with pytest.raises(ModelError, match=r"encoder: this is an encoder alone \(asr.pretrain\).*, not a recogniser$"):
        SpeechModel.load(tmp_path / "encoder")
    with pytest.raises(ModelError, match="recogniser: this is a recogniser, not a language model$"):
        TextModel.load(tmp_path / "recogniser")
    (tmp_path / "recogniser" / "config.json").write_text('{"model_type": "whisper"}')
    with pytest.raises(ModelError, match="recogniser: this is another program's model .*import_model.*, not a recogn"):
        SpeechModel.load(tmp_path / "recogniser")
    with pytest.raises(ModelError, match="lm: this is a language model .*, not a recogniser or an encoder alone$"):
        load_origin(TrainConfig(data=DataConfig(train=["a"], dev=["b"]), init_from=str(tmp_path / "lm")))


def test_a_field_of_another_version_is_named(tiny_model, tmp_path):
    tiny_model.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["model"]["mixture_of_experts"] = 8
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="mixture_of_experts"):
        SpeechModel.load(tmp_path)


def test_a_full_disk_leaves_the_model_that_was_there(tiny_model, tmp_path, monkeypatch):
    tiny_model.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(tensors, path, metadata):
        path.write_bytes(b"a part")
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("asr.model.folder.save_file", full)
    with pytest.raises(OSError, match="model.safetensors: I/O error: No space left on device"):
        tiny_model.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_of_a_training_folder_the_error_names_the_model_in_it(tiny_model, tmp_path):
    tiny_model.save(tmp_path / "model")
    with pytest.raises(ModelError, match=rf"not a model folder \(config.json is missing\); {tmp_path}/model is one"):
        SpeechModel.load(tmp_path)
