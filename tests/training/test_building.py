import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import asr
from asr.audio.config import FeatureConfig
from asr.decode.tuning import LANGUAGE_MODEL, TUNING
from asr.model.config import ModelConfig
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from asr.text.tokenizer import CharTokenizer
from asr.training.building import adapt_model, build_tokenizer, load_origin, writing_of
from asr.training.config import DataConfig, TokenizerConfig, TrainConfig
from asr.training.data import SpeechData
from asr.training.run import _save, train
from tests.decode.test_graphs import of_kind
from tests.training.tones import options

TEXTS = ["red red fox", "blue sky", "green red"] * 9


def test_fine_tuning_goes_on_from_the_weights_and_shape_of_a_folder(corpus, trained, tmp_path, caplog):
    caplog.set_level("INFO", "asr")
    settings = [f"init_from={trained[0]}", "model.d_model=64", "tokenizer.kind=bpe", "optimizer.lr=1e-5", "epochs=1"]
    folder, wer = train(options(corpus, tmp_path / "exp", *settings))
    assert "the model's own tokenizer is used" in caplog.text and "d_model 32 (64)" in caplog.text
    assert "M of them trained" not in caplog.text
    assert wer <= trained[1] + 5
    before, after = SpeechModel.load(trained[0]), SpeechModel.load(folder)
    assert after.transformer.config == before.transformer.config
    for name, weight in after.state_dict().items():
        torch.testing.assert_close(weight, before.state_dict()[name], atol=1e-3, rtol=0)
    resumed, _ = train(options(corpus, tmp_path / "exp", *settings, "resume=true"))
    assert asr.load(resumed).transcribe(corpus / "dev" / "0.wav").error is None


def test_with_the_origins_whole_share_the_origin_comes_out(corpus, trained, tmp_path):
    settings = [f"init_from={trained[0]}", "origin_share=1", "epochs=1"]
    folder, _ = train(options(corpus, tmp_path / "exp", *settings))
    before, after = SpeechModel.load(trained[0]).state_dict(), SpeechModel.load(folder).state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_with_the_origins_whole_share_a_deeper_model_computes_what_the_origin_did(corpus, trained, tmp_path):
    settings = [f"init_from={trained[0]}", "add_layers=1", "origin_share=1", "epochs=1"]
    folder, wer = train(options(corpus, tmp_path / "exp", *settings))
    before, after = SpeechModel.load(trained[0]), SpeechModel.load(folder)
    assert after.transformer.config.encoder_layers == before.transformer.config.encoder_layers + 1
    assert wer == pytest.approx(trained[1])
    sound, text = (torch.randn(1, 16_000), torch.tensor([16_000])), (torch.tensor([[4, 5]]), torch.tensor([2]))
    torch.testing.assert_close(after(*sound, *text).log_probs, before(*sound, *text).log_probs, atol=1e-3, rtol=1e-3)


def test_frozen_layers_stay_as_they_are(corpus, trained, tmp_path):
    settings = [f"init_from={trained[0]}", "freeze_layers=1", "epochs=1"]
    folder, _ = train(options(corpus, tmp_path / "exp", *settings))
    before, after = (SpeechModel.load(f).transformer.encoder for f in (trained[0], folder))
    for name, weight in before.state_dict().items():
        frozen = name.startswith(("subsampling.", "layers.0."))
        assert torch.equal(weight, after.state_dict()[name]) == frozen, name


def test_the_new_tokens_of_a_text_encoder_are_learnt_below_frozen_layers():
    origin, tokenizer = of_kind("of text").model, CharTokenizer.train(["äöü"])
    for new, frozen in ((tokenizer, False), (origin.tokenizer, True)):
        settings = {"model": origin.transformer.config, "freeze_layers": 1, "new_tokenizer": not frozen}
        config = TrainConfig(data=DataConfig(train=["a"], dev=["a"]), init_from="a", **settings)
        encoder = adapt_model(origin, config, new).transformer.encoder
        assert encoder.subsampling.table.weight.requires_grad != frozen
        assert not any(weight.requires_grad for weight in encoder.layers[0].parameters())


def test_the_lowest_layers_that_were_there_are_frozen_and_none_that_is_added(corpus, trained, tmp_path):
    config = options(corpus, tmp_path, f"init_from={trained[0]}", "freeze_layers=2", "add_layers=2")
    layers = adapt_model(load_origin(config), config, load_origin(config).tokenizer).transformer.encoder.layers
    trainable = [all(p.requires_grad for p in layer.parameters()) for layer in layers]
    frozen = [not any(p.requires_grad for p in layer.parameters()) for layer in layers]
    assert len(layers) == 4 and trainable == [False, True, False, True] and frozen == [True, False, True, False]


def test_another_models_tokenizer_is_taken_from_its_folder_with_its_normaliser(tmp_path):
    tokenizer = CharTokenizer.train(["ABC."])
    SpeechModel(FeatureConfig(), Transformer(ModelConfig(vocab_size=8)), tokenizer, "neutral").save(tmp_path)
    assert writing_of(str(tmp_path)) == (tokenizer, "neutral")
    with pytest.raises(ValueError, match="tokenizer.folder: .*nowhere"):
        writing_of(str(tmp_path / "nowhere"))


def test_a_training_takes_another_models_tokenizer_and_goes_on_without_it(trained, corpus, tmp_path):
    moved = tmp_path / "moved"
    shutil.copytree(trained[0], moved)
    settings = [f"tokenizer.folder={moved}", "tokenizer.kind=bpe"]
    folder, _ = train(options(corpus, tmp_path / "exp", *settings, "epochs=1"))
    assert SpeechModel.load(folder).tokenizer == SpeechModel.load(trained[0]).tokenizer
    with pytest.raises(ValueError, match="tokenizer.folder: init_from"):
        train(options(corpus, tmp_path / "other", *settings, f"init_from={trained[0]}"))
    shutil.rmtree(moved)
    train(options(corpus, tmp_path / "exp", *settings, "epochs=2", "resume=true"))


def test_a_tuning_of_other_weights_and_a_language_model_that_is_left_behind_are_told(corpus, trained, tmp_path, caplog):
    caplog.set_level("INFO", "asr")
    origin, folder = shutil.copytree(trained[0], tmp_path / "origin"), tmp_path / "model"
    (origin / LANGUAGE_MODEL).mkdir()
    config, data = options(corpus, tmp_path, f"init_from={origin}"), SimpleNamespace(transcripts=lambda: ["low mid"])
    _save(SpeechModel.load(origin), config, data, folder)
    assert f"asr.tune DEV --model {folder} --lm {origin / LANGUAGE_MODEL} " in caplog.text and TUNING not in caplog.text
    caplog.clear()
    (folder / TUNING).touch()
    _save(SpeechModel.load(origin), replace(config, new_tokenizer=True), data, folder)
    assert f"{folder / TUNING} was tuned for other weights" in caplog.text and "asr.tune DEV" not in caplog.text


def test_another_toolkits_tokenizer_goes_with_its_model_alone(tmp_path, monkeypatch):
    SpeechModel(FeatureConfig(), Transformer(ModelConfig(vocab_size=8)), CharTokenizer("abcd")).save(tmp_path)
    monkeypatch.setattr("asr.training.building.load_tokenizer", lambda folder: object())
    with pytest.raises(ValueError, match="tokenizer.folder: the tokenizer of .* only fits its own model"):
        writing_of(str(tmp_path))


def test_with_a_new_tokenizer_what_depends_on_the_vocabulary_begins_as_what_wrote_it_before(corpus, trained, tmp_path):
    config = options(corpus, tmp_path, f"init_from={trained[0]}", "new_tokenizer=true")
    origin = SpeechModel.load(trained[0])
    tokenizer = build_tokenizer(TokenizerConfig("bpe", 20), ["low low mid high"] * 9)
    model = adapt_model(origin, config, tokenizer)
    assert model.transformer.ctc.out_features == len(tokenizer) != len(origin.tokenizer)
    token = next(i for i in range(len(tokenizer)) if tokenizer.piece(i) == "\u2581low")
    for name in ("ctc.weight", "ctc.bias", "decoder.embedding.weight", "decoder.output.bias"):
        old, new = (m.transformer.state_dict()[name] for m in (origin, model))
        torch.testing.assert_close(new[token], old[origin.tokenizer.encode(" low")].mean(dim=0))
    assert torch.equal(model.front_end.mean, origin.front_end.mean)
    for part in ("encoder", "decoder.layers"):
        old, new = (m.transformer.get_submodule(part).state_dict() for m in (origin, model))
        assert all(torch.equal(old[name], new[name]) for name in old)


@pytest.mark.parametrize(
    "wrong",
    [
        *(["freeze_layers=1"], ["add_layers=1"], ["new_tokenizer=true"]),
        *(["init_from={}", "freeze_layers=9"], ["init_from={}", "add_layers=9"], ["init_from={}", "add_layers=-1"]),
    ],
)
def test_what_needs_layers_that_are_not_there_is_refused(corpus, trained, tmp_path, wrong):
    with pytest.raises(ValueError, match="freeze_layers|add_layers|new_tokenizer"):
        train(options(corpus, tmp_path / "exp", *(word.format(trained[0]) for word in wrong)))


@pytest.fixture
def without_ctc(tmp_path):
    """A model shaped like Whisper that writes characters after a prompt of two tokens."""
    tokenizer = CharTokenizer.train(TEXTS)
    config = ModelConfig(
        vocab_size=len(tokenizer),
        input_dim=40,
        d_model=32,
        ffn_dim=64,
        encoder_layers=1,
        decoder_layers=1,
        ctc=False,
        output_bias=False,
        key_bias=False,
        prompt=(2, 0),
        subsampler="conv1d",
        subsampling=2,
        positions="sinusoidal_halves",
        decoder_positions="learned",
        max_positions=60,
    )
    features = FeatureConfig("whisper", 40, pad_seconds=2.0)
    folder = tmp_path / "without_ctc"
    SpeechModel(features, Transformer(config), tokenizer).save(folder)
    return folder


def test_a_model_without_a_ctc_head_is_fine_tuned_by_attention_alone(corpus, without_ctc, tmp_path):
    settings = [f"init_from={without_ctc}", "epochs=1", "optimizer.lr=1e-3", "validation.strategy=greedy"]
    settings += ["validation.beam_size=1"]
    folder, _ = train(options(corpus, tmp_path / "exp", *settings))
    before, after = SpeechModel.load(without_ctc), SpeechModel.load(folder)
    assert after.transformer.config == replace(before.transformer.config, dropout=after.transformer.config.dropout)
    moved = [
        n for n, w in after.transformer.state_dict().items() if not torch.equal(w, before.transformer.state_dict()[n])
    ]
    assert len(moved) == len(after.transformer.state_dict())


def test_a_validation_that_needs_ctc_is_refused_before_the_training(corpus, without_ctc, tmp_path):
    with pytest.raises(ValueError, match="validation: .* no CTC head"):
        train(options(corpus, tmp_path / "exp", f"init_from={without_ctc}"))


def test_with_a_new_tokenizer_it_gets_a_ctc_head(corpus, without_ctc, tmp_path):
    config = options(corpus, tmp_path, f"init_from={without_ctc}", "new_tokenizer=true")
    model = adapt_model(SpeechModel.load(without_ctc), config, build_tokenizer(TokenizerConfig("bpe", 24), TEXTS))
    assert model.transformer.ctc.out_features == 24
    assert model.transformer.config.prompt == (2,)


def test_what_the_decoder_has_no_positions_for_is_left_out(corpus, without_ctc, tmp_path, caplog):
    origin = SpeechModel.load(without_ctc)
    config = replace(origin.transformer.config, max_positions=2 + len("red"))
    SpeechModel(origin.front_end.config, Transformer(config), origin.tokenizer).save(without_ctc)
    data = SpeechData(options(corpus, tmp_path).data, seed=1)
    lengths = [len(cut.supervisions[0].text) for cut in data.train_cuts]
    data.fit_to(SpeechModel.load(without_ctc))
    kept = [len(cut.supervisions[0].text) for cut in data.train_cuts]
    assert max(kept) <= 3 < max(lengths)
    assert "decoder has positions for" in caplog.text
    batch = next(iter(data.val_dataloader()))
    assert batch.Y.shape[1] == 3  # not padded to a multiple that exceeds the positions


def test_batches_count_the_windows_that_sounds_are_padded_to(corpus, without_ctc, tmp_path):
    config = options(corpus, tmp_path, "data.max_seconds=4", "data.batch_seconds=6", "data.global_batch_seconds=6").data
    data = SpeechData(config, seed=1)
    data.fit_to(SpeechModel.load(without_ctc))  # its window is 2 s
    assert max(bucket.utterances for bucket in data.buckets) == 3
    assert max(len(batch.lens) for batch in data.val_dataloader()) == 3
