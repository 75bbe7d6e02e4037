"""All stages of the Mini LibriSpeech recipe, and the first of LibriSpeech's, on miniatures in LibriSpeech's layout."""

import json
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
    write_parts(tmp_path / "data", "train-clean-5", "dev-clean-2")
    return tmp_path / "data"


def test_from_the_folders_to_the_table_and_what_is_done_is_skipped(data, tmp_path, programs):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat\non the mat\n" * 20)
    arguments = ["--data", data, "--text", text, *TINY]
    done = run_recipe("mini_librispeech", *arguments, cwd=tmp_path, programs=programs)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "exp" / "mini_librispeech"
    table = (out / "RESULTS.md").read_text().splitlines()
    assert table[2].startswith("| dev-clean-2 | ") and "%" in table[2]
    assert "revision" in table[-1] and "epochs=1" in table[-1]
    assert json.loads((out / "model" / "decoding.json").read_text())["options"]["beam_size"] == 60
    assert (out / "model" / "lm" / "model.safetensors").is_file()

    again = run_recipe("mini_librispeech", *arguments, cwd=tmp_path, programs=programs)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("done before") == 7


def test_a_stage_that_failed_says_how_to_go_on_and_does(data, tmp_path, programs):
    (data / "LibriSpeech" / "dev-clean-2").rename(tmp_path / "elsewhere")
    (data / "LibriSpeech" / "dev-clean-2").mkdir()
    broken = run_recipe("mini_librispeech", "--data", data, "--stop-stage", "2", cwd=tmp_path, programs=programs)
    assert broken.returncode != 0
    assert "stage 2 failed; when its cause is mended, the same command goes on with it" in broken.stderr
    (data / "LibriSpeech" / "dev-clean-2").rmdir()
    (tmp_path / "elsewhere").rename(data / "LibriSpeech" / "dev-clean-2")
    mended = run_recipe("mini_librispeech", "--data", data, "--stop-stage", "2", cwd=tmp_path, programs=programs)
    assert mended.returncode == 0, mended.stderr
    assert mended.stdout.count("done before") == 1
    cuts = tmp_path / "exp" / "mini_librispeech" / "cuts"
    assert sorted(path.name for path in cuts.iterdir()) == ["dev-clean-2.jsonl.gz", "train-clean-5.jsonl.gz"]


def test_a_hundred_hours_want_five_parts(tmp_path, programs):
    write_parts(tmp_path, "train-clean-100", "dev-clean", "dev-other", "test-clean", "test-other")
    done = run_recipe("librispeech", "--data", tmp_path, "--stop-stage", "1", cwd=tmp_path, programs=programs)
    assert done.returncode == 0, done.stderr  # nothing is downloaded: all parts are there
    assert (tmp_path / "exp" / "librispeech_100" / ".done" / "1").is_file()


@pytest.mark.parametrize(
    "arguments", [["--subset", "7"], ["--subset"], [], ["--data"], ["--data", ".", "--text", "nowhere"]]
)
def test_wrong_arguments_are_one_line_and_code_two(tmp_path, arguments):
    done = run_recipe("librispeech", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("run.sh: ")
