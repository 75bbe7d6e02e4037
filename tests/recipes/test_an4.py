"""All stages of the AN4 recipe, on a miniature corpus in AN4's own layout."""

from pathlib import Path

import numpy as np
import pytest
import soundfile

from asr.audio.reading import SAMPLE_RATE
from tests.recipes.conftest import SMALL, run_recipe


@pytest.fixture
def an4(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    (tmp_path / "an4" / "etc").mkdir(parents=True)
    for part, speakers in (("train", "abcdefg"), ("test", "xy")):
        fileids, transcripts = [], []
        for speaker in speakers:
            name = f"an4_{part}/{speaker}/{speaker}1"
            path = tmp_path / "an4" / "wav" / f"{name}.sph"
            path.parent.mkdir(parents=True)
            soundfile.write(path, rng.normal(0, 0.1, SAMPLE_RATE), SAMPLE_RATE, format="NIST", subtype="PCM_16")
            fileids.append(name)
            transcripts.append(f"<s> YES </s> ({speaker}1)")
        (tmp_path / "an4" / "etc" / f"an4_{part}.fileids").write_text("\n".join(fileids) + "\n")
        (tmp_path / "an4" / "etc" / f"an4_{part}.transcription").write_text("\n".join(transcripts) + "\n")
    return tmp_path / "an4"


def test_from_the_audio_to_the_table(an4, tmp_path, programs):
    done = run_recipe("an4", "--data", an4, *SMALL, cwd=tmp_path, programs=programs)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "exp" / "an4" / "RESULTS.md").read_text().splitlines()
    assert len(table) == 2 + 2 * 3
    assert all("%" in row for row in table[2:])


def test_stages_run_on_their_own(an4, tmp_path, programs):
    done = run_recipe("an4", "--data", an4, "--stop-stage", "1", cwd=tmp_path, programs=programs)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "exp" / "an4" / "cuts" / "dev.jsonl.gz").is_file()
    assert not (tmp_path / "exp" / "an4" / "model").exists()


def test_what_is_done_again_is_trained_anew(an4, tmp_path, programs):
    """A finished stage that is asked for again starts from scratch, and so does a later one whose data were remade."""
    model = tmp_path / "exp" / "an4" / "first" / "model"
    until = ["--data", an4, "--stop-stage", "2", *SMALL]
    done = run_recipe("an4", *until, cwd=tmp_path, programs=programs)
    assert done.returncode == 0 and "epoch 1/1" in done.stderr, done.stderr
    assert "epoch" not in run_recipe("an4", *until, cwd=tmp_path, programs=programs).stderr
    for part in ("train", "test"):
        path = an4 / "etc" / f"an4_{part}.transcription"
        path.write_text(path.read_text().replace("YES", "NO"))
    again = run_recipe("an4", "--data", an4, "--stage", "1", "--stop-stage", "1", cwd=tmp_path, programs=programs)
    assert again.returncode == 0, again.stderr
    assert "y" in (model / "characters.json").read_text()  # it stays until it is trained again
    anew = run_recipe("an4", *until, cwd=tmp_path, programs=programs)
    assert "epoch 1/1" in anew.stderr, anew.stderr
    assert "y" not in (model / "characters.json").read_text()


@pytest.mark.parametrize("arguments", [["--data", "nowhere"], ["--frobnicate"], ["--stage", "two"]])
def test_wrong_arguments_are_one_line_and_code_two(tmp_path, arguments):
    done = run_recipe("an4", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("run.sh: ")
