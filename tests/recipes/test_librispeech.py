"""The LibriSpeech recipe, all stages, on a miniature in LibriSpeech's own layout, and from a server of its own."""

from pathlib import Path

import pytest

from tests.conftest import write_librispeech
from tests.recipes.conftest import SMALL, run_recipe

TINY = [*SMALL, "tokenizer.kind=char", "data.workers=0"]


def write_parts(folder: Path, *parts: str) -> None:
    for part in parts:
        write_librispeech(folder / "LibriSpeech" / part, utterances=4)


@pytest.fixture
def data(tmp_path) -> Path:
    write_parts(tmp_path / "data", "train-clean-100", "dev-clean", "dev-other", "test-clean", "test-other")
    return tmp_path / "data"


def test_from_the_folders_to_the_table(data, tmp_path):
    done = run_recipe("librispeech", "--data", data, *TINY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "exp" / "librispeech_100" / "RESULTS.md").read_text().splitlines()
    assert [row.split(" | ")[0] for row in table[2:6]] == ["| dev-clean", "| dev-other", "| test-clean", "| test-other"]
    assert all("%" in row for row in table[2:6])
    assert "revision" in table[-1] and "epochs=1" in table[-1]

    again = run_recipe("librispeech", "--data", data, *TINY, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("done before") == 4


def test_a_stage_that_failed_says_how_to_go_on_and_does(data, tmp_path):
    broken = run_recipe("librispeech", "--data", data, *TINY, "epochs=0", cwd=tmp_path)
    assert broken.returncode != 0
    assert "stage 3 failed; the same command goes on with it" in broken.stderr
    assert "epochs" in broken.stderr
    mended = run_recipe("librispeech", "--data", data, *TINY, "--stop-stage", "3", cwd=tmp_path)
    assert mended.returncode == 0, mended.stderr
    assert mended.stdout.count("done before") == 2
    assert (tmp_path / "exp" / "librispeech_100" / "model" / "config.json").is_file()


def test_the_mini_recipe_is_the_same_with_its_own_parts(tmp_path):
    write_parts(tmp_path, "train-clean-5", "dev-clean-2")
    done = run_recipe("mini_librispeech", "--data", tmp_path, "--stop-stage", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cuts = tmp_path / "exp" / "mini_librispeech" / "cuts"
    assert sorted(path.name for path in cuts.iterdir()) == ["dev-clean-2.jsonl.gz", "train-clean-5.jsonl.gz"]


@pytest.mark.parametrize("arguments", [["--subset", "7"], [], ["--data"]])
def test_wrong_arguments_are_one_line_and_code_two(tmp_path, arguments):
    done = run_recipe("librispeech", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("run.sh: ")
