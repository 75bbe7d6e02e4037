"""Options on the command line, and what a resumed training makes of them."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from lightning.pytorch.utilities.exceptions import SIGTERMException
from omegaconf import OmegaConf

from asr.composition import (
    OPTIONS,
    _with_saved_options,
    build_config,
    ends_in_one_line,
    register,
    training_command,
)
from asr.model.config import PRESETS
from asr.resources import resource
from asr.training.config import DataConfig, LMTrainConfig, TrainConfig
from asr.training.module import SpeechTraining
from asr.training.run import train
from tests.conftest import ROOT
from tests.test_commands import call
from tests.training.tones import composed, options

SCHEMAS = {"train": TrainConfig, "train_lm": LMTrainConfig}


def resumed(out: Path, *typed: str, command: str = "train") -> Any:
    """The options of the training in `out` when it is resumed with the options `typed`."""
    words = [f"out={out}", *typed]
    saved, _ = _with_saved_options(
        composed(command, words), SCHEMAS[command], OverridesParser.create().parse_overrides(words)
    )
    return build_config(saved)


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("foo=1", "foo: no such option"),
        ("lr=1e-3", "lr: no such option; optimizer.lr?"),
        ("+optimizer.warmpu=3", "optimizer.warmpu: no such option; optimizer.warmup?"),
        ("data.trian=[x]", "data.trian: no such option; data.train"),
        ("data.rir=1", "data.rir: no such option; data.rirs?"),
        ("model.name=3", "model.name: no such option"),
        ("experimant=digits", "experimant: no such option; experiment?"),
        ("experiment=null", "experiment=null: Config group override must be a string"),
        ("epochs=abc", "epochs=abc (Value 'abc' of type 'str' could not be converted to Integer)"),
        ("data.train=x.jsonl", "data.train=x.jsonl (a list is written in brackets: 'NAME=[A,B]')"),
        ("experiment=nope", "experiment/nope"),
        ("model=huge", "model/huge"),
        ("epochs=[", "epochs=[: not NAME=VALUE as Hydra reads it (a value with characters"),
        ("data.train=[é.jsonl]", "data.train=[é.jsonl]: not NAME=VALUE"),
        ("model.vocab_size=300", "model.vocab_size follows from the tokenizer"),
        ("validation.lm_weight=0.5", "validation.lm_weight: "),
        ("precision=bf16-true", "precision: 'bf16-true' is not one of auto, 32-true"),
        ("strategy=deepspeed", "strategy: 'deepspeed' is not one of auto, ddp, fsdp"),
        ("optimizer.betas=[0.9]", "optimizer.betas must be two"),
        ("optimizer.weight_decay=-1", "optimizer.weight_decay"),
    ],
)
def test_a_mistyped_option_is_one_line_and_code_two(tmp_path, typed, named):
    done = call("asr.train", f"out={tmp_path / 'exp'}", typed)
    assert done.returncode == 2 and not (tmp_path / "exp").exists()
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith("asr.train: ") and named in line


def test_a_preset_where_there_are_none_is_said(tmp_path):
    done = call("asr.train_lm", f"out={tmp_path / 'exp'}", "model=tiny")
    assert done.stderr.decode().strip() == (
        "asr.train_lm: model: takes no preset here; model.NAME=... sets an option of it"
    )


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("optimizer.lr=0", "optimizer.lr"),
        ("optimizer.lr=inf", "optimizer.lr"),
        ("optimizer.lr=nan", "optimizer.lr: nan"),
        ("optimizer.warmup=inf", "lr and warmup finite"),
        ("data.global_batch_seconds=inf", "data.global_batch_seconds must be finite"),
        ("data.snr=[nan,5]", "data.snr"),
        ("seed=-1", "seed"),
        ("seed=5000000000", "seed"),
        ("data.train=[]", "data.train"),
        ("data.batch_seconds=5", "data.batch_seconds"),
        ("data.speeds=[9]", "data.speeds"),
        ("data.codec=2", "data.codec"),
        ("data.noise_prob=-1", "data.noise_prob"),
        ("data.noise_prob=0.3", "data.noises"),
        ("data.rirs=[x]", "data.rir_prob"),
        ("data.snr=[20,5]", "data.snr"),
        ("tokenizer.kind=phones", "tokenizer.kind"),
        ("model.subsampling=3", "model.subsampling"),
        ("data.normalizer=german", "normalizer"),
        ("validation.strategy=ddp", "validation: strategy: 'ddp'"),
    ],
)
def test_a_wrong_option_is_named_as_the_user_types_it(corpus, tmp_path, override, named):
    with pytest.raises(ValueError, match=named):
        options(corpus, tmp_path, override)


def test_a_tilde_in_quotes_is_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    done = call("asr.train", "out='~/exp/a'", "data.train=[nowhere]", cwd=tmp_path)
    assert done.returncode == 2 and b"nowhere: no such file" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["exp"] and (tmp_path / "exp" / "a").is_dir()


def test_a_full_disk_for_which_tensorboard_names_no_file_is_that_of_the_training(tmp_path, monkeypatch):
    def full(config):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("asr.training.run.train", full)
    done = call("asr.train", "out=exp/a", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.decode() == "asr.train: [Errno 28] No space left on device: 'exp/a'\n"


@pytest.mark.parametrize("out", ["file", "file/exp"])
def test_a_folder_that_cannot_be_made_is_named_with_its_option(tmp_path, out):
    (tmp_path / "file").touch()
    done = call("asr.train", f"out={out}", cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.decode().startswith(f"asr.train: out={out}: ")


def test_a_start_that_is_refused_leaves_the_options_of_the_earlier_training(tmp_path):
    best = tmp_path / "checkpoints" / "000-1.00.ckpt"
    best.parent.mkdir()
    best.touch()
    (tmp_path / OPTIONS).write_text("epochs: 7\n")
    done = call("asr.train", f"out={tmp_path}")
    assert done.returncode == 2 and b"000-1.00.ckpt is of a training that ended" in done.stderr
    assert (tmp_path / OPTIONS).read_text() == "epochs: 7\n"


def test_the_command_says_what_is_wrong_in_one_line(tmp_path):
    done = call("asr.train", "data.train=[nowhere]", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.strip() == b"asr.train: nowhere: no such file or folder"


@pytest.mark.parametrize("experiment", [path.stem for path in (resource("conf") / "experiment").glob("*.yaml")])
def test_every_shipped_experiment_composes(experiment):
    register()
    words = [f"experiment={experiment}", "data.train=[a]", "data.dev=[b]"]
    with initialize_config_dir(str(resource("conf")), version_base="1.3"):
        found = compose("train", words)
    assert found == composed("train", words)  # as other tests compose
    config = build_config(found)
    assert isinstance(config, TrainConfig) and isinstance(config.data, DataConfig)


def test_what_is_composed_can_be_changed_without_a_trace():
    """Hydra's store is not copied as a whole."""
    register()
    with initialize_config_dir(str(resource("conf")), version_base="1.3"):
        first = compose("train", ["model=tiny"])
        first.model.d_model = first.data.batch_seconds = 1
        second = compose("train", ["model=tiny"])
    assert second.model.d_model == PRESETS["tiny"].d_model and second.data.batch_seconds != 1


def test_the_composed_config_is_shown(tmp_path):
    done = call("asr.train", "--cfg", "job", cwd=tmp_path)
    shown = OmegaConf.create(done.stdout.decode())
    assert shown.model.d_model == 96
    assert json.dumps(OmegaConf.to_container(shown, resolve=False))


def test_what_is_typed_anew_counts_more_than_what_a_training_was_begun_with(corpus, tmp_path):
    OmegaConf.save(options(corpus, tmp_path, "epochs=1", "wandb=speech", "data.speeds=[0.9,1.0]"), tmp_path / OPTIONS)
    typed = ["epochs=2", "wandb=", "++seed=3", "data.train=[a.jsonl,b.jsonl]"]
    config = resumed(tmp_path, *typed)
    assert (config.epochs, config.wandb, config.seed, config.data.train) == (2, "", 3, ["a.jsonl", "b.jsonl"])
    assert config.data.speeds == [0.9, 1.0]


def test_what_was_typed_at_one_resume_counts_at_the_next(corpus, tmp_path):
    for typed in (["epochs=1"], ["epochs=2", "optimizer.lr=1e-5", "resume=true"]):
        train(options(corpus, tmp_path, *typed))
        if not (tmp_path / OPTIONS).exists():
            OmegaConf.save(options(corpus, tmp_path, *typed), tmp_path / OPTIONS)
    config = resumed(tmp_path, "resume=true")
    assert (config.epochs, config.optimizer.lr, config.model.d_model) == (2, 1e-5, 32)
    assert config.out == str(tmp_path)


def test_an_option_that_is_newer_than_the_training_had_its_default(tmp_path):
    saved = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(options(tmp_path, tmp_path, "epochs=1"))))
    del saved.model["conv_kernel"]
    OmegaConf.save(saved, tmp_path / OPTIONS)
    assert resumed(tmp_path, "model.conv_kernel=15", "epochs=2").epochs == 2


@pytest.mark.parametrize("typed", ["features={dim: 40}", "optimizer={kind: muon, lr: 1e-3}"])
def test_options_typed_together_are_checked_one_by_one(tmp_path, typed):
    OmegaConf.save(options(tmp_path, tmp_path), tmp_path / OPTIONS)
    with pytest.raises(ValueError, match=r"resume=true: (features.dim is 80|optimizer.kind is adamw) in the training"):
        resumed(tmp_path, typed)


def test_a_training_is_not_resumed_with_another_model(corpus, tmp_path):
    train(options(corpus, tmp_path / "exp", "epochs=1"))
    OmegaConf.save(options(corpus, tmp_path / "exp"), tmp_path / "exp" / "config.yaml")
    for typed, width in [("model.d_model=64", 64), ("model=conformer-s", 144)]:
        done = call("asr.train", f"out={tmp_path / 'exp'}", "resume=true", typed)
        assert done.returncode == 2
        assert done.stderr.decode().strip() == (
            f"asr.train: resume=true: model.d_model is 32 in the training that is to be resumed, not {width}"
        )


def test_the_command_that_began_it_goes_on_although_the_model_took_another_shape(corpus, tmp_path):
    origin, _ = train(options(corpus, tmp_path / "origin", "epochs=1"))
    began = [f"init_from={origin}", "add_layers=1", "model.d_model=64", "features.normalization=utterance"]
    OmegaConf.save(options(corpus, tmp_path, *began), tmp_path / OPTIONS)
    train(options(corpus, tmp_path, *began, "epochs=1"))
    config = resumed(tmp_path, *began, "epochs=2", "resume=true")
    assert (config.model.d_model, config.model.encoder_layers, config.epochs) == (32, 3, 2)
    with pytest.raises(ValueError, match="resume=true: model.d_model is 32 in the training"):
        resumed(tmp_path, *began[:2], "model.d_model=96", "resume=true")
    train(options(corpus, tmp_path, *began, "epochs=2", "model.dropout=0.3", "resume=true"))
    assert resumed(tmp_path, "model.dropout=0.0", "resume=true").model.dropout == 0.0  # as at the start, but typed


def test_a_training_whose_folder_was_moved_goes_on_where_it_is(corpus, tmp_path):
    OmegaConf.save(options(corpus, tmp_path / "before"), tmp_path / OPTIONS)
    assert resumed(tmp_path, "resume=true").out == str(tmp_path)


@pytest.mark.parametrize(
    "typed",
    ["init_from=B", "optimizer.kind=muon", "freeze_layers=1", "add_layers=1", "lora_rank=1", "new_tokenizer=true"],
)
def test_a_training_is_not_resumed_from_another_beginning(tmp_path, typed):
    for name, width in (("a", 32), ("b", 64), ("like_a", 32)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(f'{{"d_model": {width}}}')
    before = options(tmp_path, tmp_path / "exp", f"init_from={tmp_path / 'a'}")
    (tmp_path / "exp").mkdir()
    OmegaConf.save(before, tmp_path / "exp" / OPTIONS)
    typed = typed.replace("B", str(tmp_path / "b"))
    with pytest.raises(ValueError, match=f"resume=true: {typed.split('=')[0]} is .* in the training"):
        resumed(tmp_path / "exp", typed)
    like_a, moved = f"{tmp_path / 'like_a'}", f"{tmp_path / 'moved'}"
    assert resumed(tmp_path / "exp", f"init_from={like_a}").init_from == like_a
    (tmp_path / "a").rename(moved)
    assert resumed(tmp_path / "exp", f"init_from={moved}").init_from == moved


def test_a_training_is_not_resumed_as_another_experiment(corpus, tmp_path):
    common = [f"out={tmp_path / 'exp'}", f"data.train=[{corpus / 'train'}]", f"data.dev=[{corpus / 'dev'}]"]
    small = ["model.d_model=32", "model.ffn_dim=64", "model.encoder_layers=2", "model.decoder_layers=1"]
    assert call("asr.train", "experiment=digits", *common, *small, "epochs=1").returncode == 0
    done = call("asr.train", "experiment=an4", f"out={tmp_path / 'exp'}", "resume=true")
    assert done.returncode == 2
    assert "resume=true: experiment is digits in the training that is to be resumed, not an4" in done.stderr.decode()
    assert call("asr.train", "experiment=digits", f"out={tmp_path / 'exp'}", "resume=true").returncode == 0


def test_a_training_resumed_before_its_first_checkpoint_keeps_its_experiment(tmp_path, monkeypatch):
    monkeypatch.setattr("asr.training.run.train", lambda config: None)
    began = ["experiment=an4", f"out={tmp_path}", f"data.train=[{tmp_path}]", f"data.dev=[{tmp_path}]"]
    for typed in (began, [f"out={tmp_path}", "resume=true"], [*began, "resume=true"]):
        done = call("asr.train", *typed)
        assert done.returncode == 0, done.stderr


def test_the_training_of_another_command_is_not_resumed(tmp_path):
    OmegaConf.save({"validate_every": 2}, tmp_path / OPTIONS)
    with pytest.raises(ValueError, match=r"resume=true: out=.* is no training of this command \(Key 'validate_every'"):
        resumed(tmp_path, command="train_lm")


@pytest.mark.parametrize("content", ["a: [1\n b: {", "- a\n", ""], ids=["damaged", "list", "empty"])
def test_what_holds_no_options_is_not_resumed(tmp_path, content):
    (tmp_path / OPTIONS).write_text(content)
    with pytest.raises(ValueError, match=f"resume=true: .*{OPTIONS}"):
        resumed(tmp_path)


def test_a_normaliser_that_follows_from_a_model_is_that_of_the_training_when_it_is_resumed(tmp_path):
    saved = OmegaConf.create(OmegaConf.to_container(OmegaConf.structured(options(tmp_path, tmp_path, "epochs=1"))))
    saved.data.normalizer = "none"  # what `auto` stood for
    OmegaConf.save(saved, tmp_path / OPTIONS)
    assert resumed(tmp_path, "data.normalizer=auto").data.normalizer == "none"
    assert resumed(tmp_path, "data.normalizer=neutral").data.normalizer == "neutral"


def test_ctrl_c_before_anything_was_begun_is_one_line(monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("hydra.main", lambda **_: lambda run: interrupted)
    with pytest.raises(SystemExit, match="130"):
        training_command("asr.train", TrainConfig, "asr.training.run:train")
    assert capsys.readouterr().err == "asr.train: interrupted\n"


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_output_is_replaced(monkeypatch, closed):
    seen = []
    monkeypatch.setattr(sys, closed, None)  # as `2>&-` does
    monkeypatch.setattr("hydra.main", lambda **_: lambda run: lambda: seen.append(getattr(sys, closed)))
    training_command("asr.train", TrainConfig, "asr.training.run:train")
    assert seen[0].name == os.devnull


def test_a_language_model_is_not_resumed_with_another_tokenizer(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "sentencepiece.model").write_text(name)
    OmegaConf.save({"tokenizer": str(tmp_path / "a")}, tmp_path / OPTIONS)
    with pytest.raises(ValueError, match="resume=true: tokenizer is .*a in the training"):
        resumed(tmp_path, f"tokenizer={tmp_path / 'b'}", command="train_lm")


def test_a_training_that_was_told_to_end_is_no_success(capsys):
    with pytest.raises(SystemExit) as ended, ends_in_one_line("asr.train"):
        raise SIGTERMException
    assert ended.value.code == 143
    assert capsys.readouterr().err == "asr.train: ended by SIGTERM; resume=true continues\n"


@pytest.mark.parametrize(("command", "offers"), [("asr.train", True), ("asr.train_lm", False), ("asr.pretrain", False)])
def test_help_offers_what_the_command_takes(command, offers):
    said = call(command, "--help").stdout.decode()
    assert said.startswith(f"python -m {command} NAME=VALUE")
    assert ("librispeech_100" in said) == offers and "save_minutes: 10.0" in said


def test_what_the_end_of_another_process_leads_to_is_one_line(capsys):
    with pytest.raises(SystemExit) as ended, ends_in_one_line("asr.train"):
        raise RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:2")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "asr.train: another process of the training has ended; resume=true continues\n"


def test_an_interrupted_training_says_how_to_go_on(corpus, tmp_path, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(SpeechTraining, "training_step", interrupted)  # Lightning catches it
    with pytest.raises(SystemExit) as ended, ends_in_one_line("asr.train"):
        train(options(corpus, tmp_path))
    assert ended.value.code == 130
    assert "asr.train: interrupted; resume=true continues\n" in capsys.readouterr().err


def test_a_reader_that_has_had_enough_ends_it_without_a_word(programs):
    reader, writer = os.pipe()
    os.close(reader)
    command = [programs / "python", "-m", "asr.train", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_help_and_what_is_wrong_with_an_option_come_before_torch_is_loaded(tmp_path):
    code = f"""
import contextlib, sys
from asr.train import main
for word in ("--help", "--cfg=job", "modle=tiny", "model.d_model=7", "optimizer.lr=fast", "average=0", "data.dev=[no]"):
    sys.argv[1:] = [word, "out={tmp_path}"]
    with contextlib.suppress(SystemExit):
        main()
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout.count("save_minutes:") == 2  # in the options of the help and of the job
    named = ("modle", "model.d_model", "optimizer.lr", "average", "no: no such file or folder")
    for line, name in zip(done.stderr.splitlines(), named, strict=True):
        assert name in line
