"""The options that recipes pass to the training commands compose, wherever the recipe's folders lie."""

from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from asr.composition import build_config, register
from asr.resources import resource
from tests.recipes.conftest import run_recipe

FOLDER = "of é, 'odd' (name)"
STAND_IN = """#!/bin/bash
printf '%s\\0' "$@" >> calls
printf '\\n' >> calls
[ "$3" != prepare ] || { mkdir -p "$(dirname "${@: -1}")" && touch "${@: -1}"; } # its last option is --out
"""


@pytest.fixture
def trainings(tmp_path):
    """Runs a recipe with a stand-in for its commands, and returns each training's command and options."""
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "python").write_text(STAND_IN)
    (tmp_path / "programs" / "python").chmod(0o755)

    def run(name: str, *arguments: str) -> list[tuple[str, Any]]:
        done = run_recipe(name, *arguments, "--out", FOLDER, cwd=tmp_path, programs=tmp_path / "programs")
        assert done.returncode == 0, done.stderr
        register()
        found = []
        for line in (tmp_path / "calls").read_text().splitlines():
            _, command, *words = line.split("\0")[:-1] if line.startswith("-m") else ("", "")
            if command in ("asr.train", "asr.pretrain"):
                with initialize_config_dir(str(resource("conf")), version_base="1.3"):
                    found.append((command, build_config(compose(command.removeprefix("asr."), words))))
        return found

    return run


def test_pretraining_and_what_begins_from_it(trainings, tmp_path):
    (tmp_path / "a.train.tar").touch()
    corpora = ("--speech", str(tmp_path), "--labelled", "train-clean-5", "--dev", "dev-clean-2")
    (_, encoder), *recognisers = trainings("pretrain", *corpora, "--stop-stage", "4")
    assert encoder.data.train == [f"{FOLDER}/cuts/a.train.jsonl.gz"]
    prepared = [line.split("\0") for line in (tmp_path / "calls").read_text().splitlines() if "\0prepare\0" in line]
    assert ["--untranscribed" in words for words in prepared] == [True, False, False]
    assert (encoder.model.subsampling, encoder.model.d_model) == (8, 192)
    assert {command for command, _ in recognisers} == {"asr.train"} and len(recognisers) == 2
    for _, config in recognisers:
        assert (config.model.subsampling, config.optimizer.kind, config.optimizer.lr) == (8, "adamw", 1.5e-3)
        assert (config.average, config.epochs, config.data.global_batch_seconds) == (10, 50, 40)
        assert config.data.train == [f"{FOLDER}/cuts/hour.jsonl.gz"]
    assert [config.init_from for _, config in recognisers] == [f"{FOLDER}/encoder/model", ""]


def test_matrices_with_and_without_ctc(trainings):
    linear, by4, without_ctc = (config for _, config in trainings("features_25hz", "--stop-stage", "3"))
    assert [config.model.subsampler for config in (linear, by4, without_ctc)] == ["linear", "conv2d", "linear"]
    assert [config.model.ctc for config in (linear, by4, without_ctc)] == [True, False, False]


def test_text_to_text(trainings):
    ((_, config),) = trainings("translate_numbers", "--stop-stage", "2")
    assert config.features.takes == "text"
    assert config.data.train == [f"{FOLDER}/data/train.jsonl"] and config.out == FOLDER
