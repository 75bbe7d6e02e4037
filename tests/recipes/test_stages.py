"""Which stages a recipe runs, and how it resumes: AN4's, with a stand-in for the commands that it calls."""

import shutil
import subprocess
import time

import pytest

from tests.conftest import ROOT
from tests.recipes.conftest import run_recipe

STAND_IN = """#!/bin/bash
# Says what it was asked for; a training leaves a checkpoint, and fails after it where `fail` exists.
echo "$*" >> calls
[ "$2" = asr.train ] || exit 0
for option; do [[ $option != out=* ]] || out=${option#out=}; done
out=${out#\\'} out=${out%\\'}
mkdir -p "$out/checkpoints"
touch "$out/checkpoints/last.ckpt"
[ ! -e fail ]
"""


def stand_in(programs, name: str, script: str) -> None:
    (programs / name).write_text(script)
    (programs / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path):
    (tmp_path / "programs").mkdir()
    stand_in(tmp_path / "programs", "python", STAND_IN)
    return tmp_path / "programs"


def trained(tmp_path) -> list[str]:
    """The last option of each training since the last call."""
    calls = tmp_path / "calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return [line.split()[-1] for line in lines if line.startswith("-m asr.train ")]


@pytest.fixture
def recipe(tmp_path, programs):
    """Runs the recipe up to stage 2, the first training; returns the exit status and each training's last option."""
    (tmp_path / "an4.train.tar").touch()

    def run(*arguments: str, said: str = "") -> tuple[int, list[str]]:
        flags = ["--data", tmp_path, "--stop-stage", "2", *arguments]
        done = run_recipe("an4", *flags, cwd=tmp_path, programs=programs)
        assert said in done.stderr
        return done.returncode, trained(tmp_path)

    return run


def test_what_is_done_is_done_once(recipe):
    assert recipe() == (0, ["resume=false"])
    assert recipe() == (0, [])


def test_a_training_that_was_interrupted_goes_on(recipe, tmp_path):
    (tmp_path / "fail").touch()
    assert recipe() == (1, ["resume=false"])
    (tmp_path / "fail").unlink()
    assert recipe() == (0, ["resume=true"])
    assert recipe() == (0, [])


def test_a_training_that_ended_before_it_could_go_on_begins_anew(recipe, tmp_path):
    (tmp_path / "fail").touch()
    assert recipe() == (1, ["resume=false"])
    (tmp_path / "fail").unlink()
    checkpoints = tmp_path / "exp" / "an4" / "first" / "checkpoints"
    (checkpoints / "last.ckpt").rename(checkpoints / "000-50.00.ckpt")
    assert recipe() == (0, ["resume=false"])
    assert not (checkpoints / "000-50.00.ckpt").exists()


def test_checkpoints_of_another_training_are_left_alone(recipe, tmp_path):
    checkpoints = tmp_path / "exp" / "an4" / "first" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "000-50.00.ckpt").touch()
    recipe()
    assert (checkpoints / "000-50.00.ckpt").exists()


def test_a_stage_that_is_asked_for_again_trains_anew(recipe):
    assert recipe() == (0, ["resume=false"])
    assert recipe("--stage", "2") == (0, ["resume=false"])


def test_a_training_that_is_done_again_and_interrupted_goes_on_without_stage(recipe, tmp_path):
    assert recipe() == (0, ["resume=false"])
    (tmp_path / "fail").touch()
    said = "stage 2 failed; when its cause is mended, the same command, without --stage, goes on with it"
    assert recipe("--stage", "2", said=said) == (1, ["resume=false"])
    (tmp_path / "fail").unlink()
    assert recipe() == (0, ["resume=true"])


def test_what_was_tuned_for_the_model_before_goes_with_it(recipe, tmp_path):
    recipe()
    model = tmp_path / "exp" / "an4" / "first" / "model"
    (model / "lm").mkdir(parents=True)
    (model / "decoding.json").touch()
    recipe("--stage", "2")
    assert not list(model.iterdir())


def test_a_folder_that_was_copied_is_done_again_by_itself(recipe, tmp_path):
    recipe()
    shutil.copytree(tmp_path / "exp" / "an4", tmp_path / "exp" / "variant")
    assert recipe("--out", "exp/variant", "--stage", "2") == (0, ["resume=false"])
    assert (tmp_path / "exp" / "an4" / "first" / "checkpoints" / "last.ckpt").exists()


def test_what_was_trained_on_data_that_are_made_again_is_trained_anew(recipe, tmp_path):
    assert recipe() == (0, ["resume=false"])
    assert recipe("--stage", "1", "--stop-stage", "1") == (0, [])
    assert (tmp_path / "exp" / "an4" / "first" / "checkpoints" / "last.ckpt").exists()  # until it is trained again
    assert recipe() == (0, ["resume=false"])


def test_an_interrupted_training_on_new_data_goes_on(recipe, tmp_path):
    assert recipe() == (0, ["resume=false"])
    recipe("--stage", "1", "--stop-stage", "1")
    (tmp_path / "fail").touch()
    assert recipe() == (1, ["resume=false"])
    (tmp_path / "fail").unlink()
    assert recipe() == (0, ["resume=true"])


@pytest.mark.skipif(shutil.which("flock") is None, reason="flock is not there")
def test_another_run_at_work_in_the_folder_is_left_alone(recipe, tmp_path):
    out = tmp_path / "exp" / "an4"
    out.mkdir(parents=True)
    holding = subprocess.Popen(["flock", "--no-fork", out / ".lock", "sleep", "60"])
    try:
        while subprocess.run(["flock", "-n", out / ".lock", "true"]).returncode == 0:
            time.sleep(0.01)
        assert recipe(said=f"another run is at work in {out.relative_to(tmp_path)}") == (2, [])
    finally:
        holding.kill()
        holding.wait()
    assert recipe()[0] == 0


def test_a_file_system_without_locks_is_no_other_run(recipe, programs):
    stand_in(programs, "flock", "#!/bin/sh\necho 'flock: 9: Function not implemented' >&2\nexit 71\n")
    assert recipe() == (0, ["resume=false"])


def test_an_out_that_cannot_be_made_is_said(recipe, tmp_path):
    (tmp_path / "file").touch()
    assert recipe("--out", "file/exp", said="--out 'file/exp' cannot be written to") == (2, [])


def test_help_is_the_head_of_the_recipe_and_missing_data_are_named(tmp_path):
    done = run_recipe("an4", "--help", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("AN4 from the audio to a WER table")
    assert "recipes/an4/run.sh --data DIR" in done.stdout and "set -euo" not in done.stdout
    assert run_recipe("an4", cwd=tmp_path).stderr == "run.sh: --data DIR is missing: the folder of AN4\n"


def test_more_trainings_are_added_to_those_that_there_are(tmp_path, programs):
    for part in ("train", "dev"):
        (tmp_path / "corp [1]").mkdir(exist_ok=True)
        (tmp_path / "corp [1]" / f"a.{part}.jsonl.gz").touch()

    def run(more: str, *others: str) -> list[str]:
        flags = ["--speech", tmp_path / "corp [1]", "--more", more, "--stop-stage", "6", *others]
        done = run_recipe("english", *flags, cwd=tmp_path, programs=programs)
        assert done.returncode == 0, done.stderr
        return trained(tmp_path)

    assert run("0") == ["resume=false"] * 2
    assert run("1") == ["resume=false"]
    assert run("0", "--stage", "9", "--stop-stage", "9") == []
    assert run("1") == []
    assert run("2") == ["resume=true", "resume=false"]
    assert run("2") == []


def test_two_corpora_of_one_name_are_refused(tmp_path):
    for name in ("a.train", "a.dev"):
        (tmp_path / "speech" / name).mkdir(parents=True)
        shutil.copy(ROOT / "data" / "samples" / "corner.flac", tmp_path / "speech" / name / "a.flac")
        (tmp_path / "speech" / name / "a.txt").write_text("one")
    (tmp_path / "speech" / "a.train.jsonl").write_text('{"audio_filepath": "a.train/a.flac", "text": "one"}')
    done = run_recipe("english", "--speech", tmp_path / "speech", "--stop-stage", "1", cwd=tmp_path)
    assert done.returncode == 2 and "holds two corpora called a.train" in done.stderr
