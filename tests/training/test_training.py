"""The whole training loop on a corpus made on the spot."""

import importlib.util
import re
import shutil
import types
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import soundfile
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch._dynamo.testing import CompileCounter

import asr
from asr.audio.distort import Distortion
from asr.audio.reading import SAMPLE_RATE
from asr.corpus import open_corpus
from asr.corpus.utterances import write_cuts
from asr.model.layers import layers_of
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from asr.training.averaging import average_checkpoints, best_checkpoints, figure_of
from asr.training.callbacks import Patience, Samples
from asr.training.data import SpeechData
from asr.training.loss import Losses
from asr.training.module import SpeechTraining
from asr.training.report import PANELS, write_report
from asr.training.run import train
from tests.training.tones import fitted, options, write_corpus


def test_the_loop_learns_what_it_hears(trained):
    folder, wer = trained
    assert wer < 10
    written = {path.name for path in folder.iterdir()}
    assert written == {"model.safetensors", "config.json", "characters.json", "bigram.safetensors"}


def test_the_bigram_of_its_transcripts_lies_in_the_model_folder(trained, larger):
    model = SpeechModel.load(trained[0])
    said = [path.read_text().lower().rstrip(".").split() for path in (larger / "train").glob("*.txt")]
    begins = [words[0][0] for words in said]
    low, high = model.tokenizer.encode("lh")
    first = model.transformer.bigram.log_probs[model.transformer.config.prompt[-1]]
    assert (first[low] - first[high]).exp() == pytest.approx(begins.count("l") / begins.count("h"), rel=0.2)


def test_the_exported_model_transcribes(trained, larger):
    assert SpeechModel.load(trained[0]).trained_seconds == pytest.approx(1.3)
    recognizer = asr.load(trained[0])
    heard = [recognizer.transcribe(larger / "dev" / f"{i}.wav").text for i in range(12)]
    said = [(larger / "dev" / f"{i}.txt").read_text().lower().rstrip(".") for i in range(12)]
    assert sum(h == s for h, s in zip(heard, said, strict=True)) >= 10


def test_an_average_that_is_worse_than_its_best_checkpoint_is_not_exported(corpus, tmp_path, monkeypatch, caplog):
    """Such as the average of the first epochs of a training, which have little in common."""

    def average(paths):
        weights = average_checkpoints(paths)
        return weights if len(paths) == 1 else {name: torch.randn_like(weight) for name, weight in weights.items()}

    monkeypatch.setattr("asr.training.run.average_checkpoints", average)
    monkeypatch.setattr("asr.training.run.figure_of", lambda path: -1.0)
    folder, _ = train(options(corpus, tmp_path / "out", "epochs=2", "average=2", "validate_every=1"))
    assert "the average of 2 checkpoints has a dev WER of" in caplog.text
    best = average_checkpoints(best_checkpoints(tmp_path / "out")[:1])
    exported = SpeechModel.load(folder).state_dict()
    assert all(torch.equal(exported[name], best[name]) for name in best if name in exported)


def test_what_a_training_leaves_behind(trained):
    out = trained[0].parent
    checkpoint = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["config"]["model"]["d_model"] == 32
    assert "optimizer_states" in checkpoint
    for best in best_checkpoints(out):  # an optimiser's state is twice as large as the weights
        assert "optimizer_states" not in torch.load(best, weights_only=True)
    board = EventAccumulator(str(out / "tensorboard"), size_guidance={"images": 0})
    assert len(board.Reload().Images("dev/attention")) == 24 // 6 + 1  # a picture of each validation
    for curve in ("train/total_step", "train/gradient_norm", "lr/pg1"):
        assert [point.step for point in board.Scalars(curve)] == list(range(9, checkpoint["global_step"], 10))
    report = (out / "report.html").read_text()
    assert f"dev WER {trained[1]:.2f} %" in report and "<b>heard</b>" in report
    assert all(report.count(f"<!-- {title} -->") == 1 for title in ("dev WER (%)", "learning rate"))


def test_a_report_has_every_part_of_the_loss():
    curves = {name for _, names in PANELS for name in names}
    assert {f"train/{part}_epoch" for part in Losses._fields} <= curves


def test_a_report_has_names_in_any_script_as_they_are(tmp_path):
    (tmp_path / "tensorboard").mkdir()
    write_report(tmp_path, "", {"out": "größe"})
    assert "größe" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_last_epoch_is_validated_whatever_the_interval(corpus, tmp_path):
    train(options(corpus, tmp_path / "exp", "epochs=3", "validate_every=2"))
    kept = (tmp_path / "exp" / "checkpoints").glob("0*.ckpt")
    assert sorted(path.name[:3] for path in kept) == ["001", "002"]


def test_the_same_seed_gives_the_same_numbers(corpus, tmp_path):
    weights = []
    for name in "ab":
        folder, _ = train(options(corpus, tmp_path / name, "epochs=2", "model.dropout=0.1"))
        weights.append((folder / "model.safetensors").read_bytes())
    assert weights[0] == weights[1]


def test_gradients_accumulate_to_the_global_batch(corpus, tmp_path, caplog):
    caplog.set_level("INFO", "asr")
    folder, _ = train(options(corpus, tmp_path / "exp", "epochs=1", "data.global_batch_seconds=30"))
    checkpoint = torch.load(folder.parent / "checkpoints" / "last.ckpt", weights_only=True)
    data = fitted(options(corpus, tmp_path))
    updates = -(-data.batches_per_epoch() // 3)
    parameters = sum(p.numel() for p in SpeechModel.load(folder).parameters()) / 1e6
    assert checkpoint["global_step"] == updates
    size = f"{data.train_seconds / 3600:.2f} h of audio in 30 utterances, {parameters:.1f} M parameters, 32-true"
    assert f"{size}, {updates} updates of at most 30 s" in caplog.text


@pytest.mark.parametrize("overrides", [["tokenizer.kind=bpe", "tokenizer.vocab_size=20"], ["model=conformer-s"]])
def test_other_choices_train_too(corpus, tmp_path, overrides):
    folder, _ = train(options(corpus, tmp_path / "exp", "epochs=1", *overrides))
    assert asr.load(folder).transcribe(corpus / "dev" / "0.wav").duration > 0


def test_layers_are_compiled_where_that_is_wanted(corpus, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **how: compiled.append(module))
    train(options(corpus, tmp_path / "exp", "epochs=1", "compile=true"))
    assert len(compiled) == len(layers_of(torch.nn.ModuleList(compiled))) > 1


def test_validation_compiles_nothing_its_attention_picture_neither(corpus, tmp_path, monkeypatch):
    counter, compiles, seen = CompileCounter(), torch.nn.Module.compile, []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **_: compiles(module, dynamic=True, backend=counter))
    for owner, step in (
        (SpeechTraining, "on_validation_start"),
        (Samples, "_attention"),
        (SpeechTraining, "on_validation_end"),
    ):
        whole = getattr(owner, step)

        def noted(self, *module, step=step, whole=whole):
            seen.append((step, counter.frame_count))
            return whole(self, *module)

        monkeypatch.setattr(owner, step, noted)
    torch.compiler.set_stance("force_eager")  # as a failed validation leaves it
    train(options(corpus, tmp_path / "exp", "epochs=2", "validate_every=1", "compile=true"))
    at = dict(seen)  # the last count of each step
    assert at["on_validation_start"] == at["_attention"] == at["on_validation_end"] > 0
    assert [step for step, _ in seen].count("on_validation_start") >= 2
    torch.compile(lambda x: x + 1, backend=(after := CompileCounter()))(torch.ones(2))
    assert after.frame_count == 1


def test_feature_matrices_train_and_decode(tmp_path):
    rng = np.random.default_rng(0)
    for part in ("train", "dev"):
        (tmp_path / part).mkdir()
        for i in range(20):
            np.save(tmp_path / part / f"{i}.npy", rng.normal(size=(80 + i, 12)).astype(np.float32))
            (tmp_path / part / f"{i}.txt").write_text("some text")
    overrides = ["features.kind=matrix", "features.dim=12", "epochs=1", "model.subsampling=2"]
    folder, _ = train(options(tmp_path, tmp_path / "exp", *overrides))
    recognizer = asr.load(folder)
    assert recognizer.transcribe(tmp_path / "dev" / "0.npy").segments
    assert recognizer.transcribe(np.zeros((90, 12), np.float32)).segments
    with pytest.raises(ValueError, match=r"\(T, 12\)"):
        recognizer.transcribe(np.zeros((90, 13), np.float32))


def test_what_cannot_be_aligned_or_is_too_long_is_left_out_by_name(corpus, tmp_path, caplog):
    noise = np.random.default_rng(0).normal(0, 0.1, 12 * SAMPLE_RATE)
    utterances = {"long": (12, "low"), "dense": (0.3, "high " * 30), "empty": (1, "..."), "fine": (1, "mid")}
    for name, (seconds, text) in utterances.items():
        (tmp_path / "train").mkdir(exist_ok=True)
        soundfile.write(tmp_path / "train" / f"{name}.wav", noise[: round(seconds * SAMPLE_RATE)], SAMPLE_RATE)
        (tmp_path / "train" / f"{name}.txt").write_text(text)
    data = fitted(options(corpus, tmp_path / "exp", f"data.train=[{tmp_path / 'train'}]"))
    assert [cut.id for cut in data.train_cuts] == ["fine"]
    for name in ("long", "dense", "empty"):
        assert f"left out {name}" in caplog.text


def test_a_file_that_breaks_in_training_is_left_out(corpus, tmp_path, caplog):
    data = fitted(options(corpus, tmp_path))
    data.dev_cuts[0].recording.sources[0].source = str(tmp_path / "gone.wav")
    batches = [batch for batch in data.val_dataloader() if batch]
    assert sum(len(batch.lens) for batch in batches) == 5
    assert "gone.wav: no such file" in caplog.text


def test_a_dev_file_that_breaks_does_not_end_the_training(corpus, tmp_path, caplog):
    """Not even the longest file, which is the first batch and would have its attention drawn."""
    dev = write_corpus(tmp_path / "dev", 3, seed=3)
    samples, rate = soundfile.read(dev / "0.wav")
    soundfile.write(dev / "0.flac", np.tile(samples, 20), rate)  # alone in its batch
    (dev / "0.wav").unlink()
    whole = (dev / "0.flac").read_bytes()
    (dev / "0.flac").write_bytes(whole[:200])
    folder, _ = train(options(corpus, tmp_path / "exp", f"data.dev=[{dev}]", "epochs=1"))
    assert "damaged" in caplog.text and (folder / "model.safetensors").is_file()


def test_sound_that_is_gone_ends_the_training_at_once(corpus, tmp_path):
    cuts = open_corpus(corpus / "train")
    for cut in cuts:
        cut.recording.sources[0].source = str(tmp_path / "gone.wav")
    cuts.to_file(tmp_path / "gone.jsonl.gz")
    with pytest.raises(ValueError, match="no utterance of the training set can be read"):
        train(options(corpus, tmp_path / "exp", f"data.train=[{tmp_path / 'gone.jsonl.gz'}]"))


def test_a_second_try_leaves_one_tokenizer(corpus, tmp_path, caplog):
    with pytest.raises(ValueError, match="no utterance is left"):
        train(options(corpus, tmp_path, "data.min_seconds=9"))
    assert " s is outside data.min_seconds=9 to data.max_seconds=10" in caplog.text
    bpe = ["tokenizer.kind=bpe", "tokenizer.vocab_size=20", "epochs=1"]
    train(options(corpus, tmp_path, *bpe))
    folder, _ = train(options(corpus, tmp_path, *bpe, "resume=true"))
    assert len(SpeechModel.load(folder).tokenizer) == 20


def test_a_model_that_is_trained_on_keeps_its_normaliser(corpus, tmp_path):
    base, _ = train(options(corpus, tmp_path / "base", "data.normalizer=neutral", "epochs=1"))
    further, _ = train(options(corpus, tmp_path / "further", f"init_from={base}", "epochs=1"))
    assert SpeechModel.load(further).normalizer_name == "neutral"
    new, _ = train(options(corpus, tmp_path / "new", f"init_from={base}", "new_tokenizer=true", "epochs=1"))
    assert SpeechModel.load(new).normalizer_name == "english"


def test_a_batch_is_played_at_one_speed_drawn_anew_for_each(corpus, tmp_path):
    data = fitted(options(corpus, tmp_path))
    data.trainer = L.Trainer(logger=False)
    assert {batch.speed for batch in data.train_dataloader()} == {0.9, 1.0, 1.1}
    assert {batch.speed for batch in data.val_dataloader()} == {1.0}


def test_a_logger_that_is_not_installed_is_named(corpus, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "wandb" else find(name, *rest))
    with pytest.raises(ValueError, match="pip install wandb"):
        train(options(corpus, tmp_path / "exp", "wandb=speech"))


def test_a_running_mean_of_the_weights_is_what_is_kept(corpus, tmp_path, monkeypatch):
    """theta' <- d theta' + (1 - d) theta after each update, validated and exported in place of theta."""
    out = tmp_path / "exp"
    prompts, validate = [], SpeechTraining.validation_step

    def watched(self, batch):
        prompts.append(self.model.transformer.decoder.prompt.tolist())
        validate(self, batch)

    monkeypatch.setattr(SpeechTraining, "validation_step", watched)
    settings = ["epochs=2", "validate_every=1", "ema=0.9", "optimizer.lr=1e-3", "model.prompt=[2,3]"]
    folder, wer = train(config := options(corpus, out, *settings))
    assert prompts and all(prompt == [2, 3] for prompt in prompts)
    checkpoint = torch.load(out / "checkpoints" / "last.ckpt", weights_only=True)
    mean, current = checkpoint["state_dict"], checkpoint["current_model_state"]
    name = next(key for key in mean if key.startswith("model.transformer.encoder.layers.0") and mean[key].ndim == 2)
    assert not torch.equal(mean[name], current[name])
    [best] = best_checkpoints(out)
    kept = torch.load(best, weights_only=True)["state_dict"][name]
    model = SpeechModel.load(folder)
    torch.testing.assert_close(model.state_dict()[name.removeprefix("model.")], kept)
    trainer = L.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    [scored] = trainer.validate(SpeechTraining(config, model, 1), fitted(config), verbose=False)
    assert wer == figure_of(best) == pytest.approx(scored["dev/wer"], abs=0.01)
    common = ["ema=0.9", "average=1", "optimizer.lr=1e-3", "model.prompt=[2,3]"]
    train(options(corpus, out, "epochs=3", *common, "resume=true"))


def test_without_its_moving_average_a_training_goes_on_from_what_it_had_learnt(corpus, tmp_path):
    common = ["average=1", "data.speeds=[1.0]"]
    train(options(corpus, tmp_path / "a", "epochs=1", "ema=0.999", "optimizer.lr=1e-3", *common))
    state = torch.load(tmp_path / "a" / "checkpoints" / "last.ckpt", weights_only=True)
    learnt = {name: weight.clone() for name, weight in state["current_model_state"].items()}
    train(options(corpus, tmp_path / "a", "epochs=2", "optimizer.lr=1e-12", *common, "resume=true"))
    state = torch.load(tmp_path / "a" / "checkpoints" / "last.ckpt", weights_only=True)
    for name, weight in state["state_dict"].items():
        torch.testing.assert_close(weight, learnt[name], atol=1e-6, rtol=0)


def test_what_cannot_be_read_is_counted_in_each_epoch_and_all_of_it_is_an_error(corpus, tmp_path, caplog):
    folder = Path(shutil.copytree(corpus, tmp_path / "tones"))
    write_cuts(open_corpus(folder / "train"), tmp_path / "train.jsonl.gz")
    config = options(folder, tmp_path / "a", "epochs=2", "features.normalization=cmvn")
    config.data.train = [str(tmp_path / "train.jsonl.gz")]
    files = sorted((folder / "train").glob("*.wav"))
    for path in files[:12]:
        path.unlink()
    train(config)
    for epoch in (1, 2):
        assert f"epoch {epoch}: 12 of 30 utterances could not be read, and were left out" in caplog.text
    for path in files[12:]:
        path.unlink()
    config.out = str(tmp_path / "b")
    with pytest.raises(ValueError, match="no utterance of the training set can be read"):
        train(config)


def test_an_epoch_tells_padding_waiting_and_speed(corpus, tmp_path, caplog):
    with caplog.at_level("INFO"):
        train(options(corpus, tmp_path / "exp", "epochs=1"))
    line = next(record.getMessage() for record in caplog.records if record.getMessage().startswith("epoch 1/1"))
    padding, waiting = re.search(r"([\d.]+) % padding, ([\d.]+) % waiting", line).groups()
    assert 0 < float(padding) < 40 and 0 < float(waiting) < 100


def test_a_dev_set_that_cannot_be_read_for_once_is_no_better_wer_and_nothing_else():
    patience = Patience(2, None)
    stops = [patience._evaluate_stopping_criteria(torch.tensor(wer))[0] for wer in (50.0, torch.inf, 49.0, torch.inf)]
    assert not any(stops) and patience.wait_count == 1


def test_consistency_sees_every_utterance_twice(corpus, tmp_path, monkeypatch):
    seen = []
    forward = Transformer.forward

    def watched(self, X, X_lens, Y, *rest):
        seen.append((self.training, X.detach(), Y))
        return forward(self, X, X_lens, Y, *rest)

    monkeypatch.setattr(Transformer, "forward", watched)
    train(options(corpus, tmp_path / "exp", "epochs=1", "loss.consistency=0.2"))
    trained = [(X, Y) for training, X, Y in seen if training]
    assert trained
    for X, Y in trained:
        first, second = X.chunk(2)
        assert torch.equal(*Y.chunk(2))
        assert not torch.equal(first, second)  # each has its own masks
        unmasked = (first != 0) & (second != 0)
        assert torch.equal(first[unmasked], second[unmasked])
    recorded = torch.load(tmp_path / "exp" / "checkpoints" / "last.ckpt", weights_only=True)["config"]
    assert recorded["loss"]["consistency"] == 0.2


def test_distortion_reaches_the_training_and_not_the_validation(corpus, tmp_path, monkeypatch):
    heard = []
    forward = Distortion.forward

    def watched(self, samples, lens):
        distorted = forward(self, samples, lens)
        heard.append(not torch.equal(samples, distorted))
        return distorted

    monkeypatch.setattr(Distortion, "forward", watched)
    train(options(corpus, tmp_path / "exp", "epochs=1", "distortion.noise=0.9", "distortion.room=0.9"))
    assert heard and all(heard)
    batches = SpeechData(options(corpus, tmp_path).data, seed=1)
    batches.fit_to(SpeechModel.load(tmp_path / "exp" / "model"))
    assert len(heard) == batches.batches_per_epoch()


def test_vocal_tracts_without_frequencies_are_refused_before_any_sound_is_read(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("asr.training.run.set_statistics", lambda *_: pytest.fail("read"))
    with pytest.raises(ValueError, match=r"spec_augment\.vocal_tract .*log_mel"):
        train(options(corpus, tmp_path, "features.kind=whisper", "spec_augment.vocal_tract=0.1"))


def test_what_decodes_is_trained(corpus, trained, tmp_path):
    for weight, part in ((0, "CTC head"), (1, "decoder")):
        with pytest.raises(ValueError, match=f"trains no {part}"):
            train(options(corpus, tmp_path / part, f"loss.ctc_weight={weight}"))
    begun = [f"init_from={trained[0]}", "new_tokenizer=true", "tokenizer.kind=bpe", "tokenizer.vocab_size=24"]
    with pytest.raises(ValueError, match="trains no CTC head"):
        train(options(corpus, tmp_path / "anew", "loss.ctc_weight=0", *begun))
    train(options(corpus, tmp_path / "ctc", "loss.ctc_weight=1", "validation.strategy=ctc", "epochs=1"))
    train(options(corpus, tmp_path / "further", "loss.ctc_weight=0", f"init_from={trained[0]}", "epochs=1"))


def test_consistency_without_ctc_is_refused(corpus, tmp_path):
    with pytest.raises(ValueError, match=r"loss\.ctc_weight must be positive"):
        options(corpus, tmp_path, "loss.consistency=0.2", "loss.ctc_weight=0")
    words = ["loss.consistency=0.2", "model.ctc=false", "validation.strategy=greedy", "validation.beam_size=1"]
    with pytest.raises(ValueError, match="no CTC head"):
        train(options(corpus, tmp_path / "exp", *words, "validation.ctc_weight=0"))


def test_processes_of_one_machine_share_its_cores(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("asr.training.data._cores", lambda: 16)
    data = SpeechData(options(corpus, tmp_path, "data.workers=-1").data, 1)
    for devices, workers in ((1, 8), (2, 8), (4, 4), (32, 1)):
        data.trainer = types.SimpleNamespace(num_devices=devices)
        assert data._loader(None, [1.0], []).num_workers == workers
