"""All stages of the recipe for the model that ships, on a miniature corpus."""

import io
import json
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import load_file

from asr.audio.reading import SAMPLE_RATE
from asr.decode.quantization import can_quantize
from tests.recipes.conftest import SMALL, run_recipe


def write_tar(path: Path, utterances: int) -> None:
    rng = np.random.default_rng(0)
    files, manifest = {}, []
    for i in range(utterances):
        sound = io.BytesIO()
        soundfile.write(sound, rng.normal(0, 0.1, SAMPLE_RATE), SAMPLE_RATE, format="WAV")
        files[f"{i}.wav"] = sound.getvalue()
        name = f"{path.stem}-{i}"
        manifest.append({"id": name, "audio_filepath": f"{i}.wav", "duration": 1.0, "text": "Yes.", "speaker": "a"})
    files["manifest.jsonl"] = "\n".join(map(json.dumps, manifest)).encode()
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def test_from_the_corpora_to_the_table(tmp_path, programs):
    for name, size in (("a.train", 4), ("b.train", 4), ("a.dev", 2), ("c.test", 2)):
        write_tar(tmp_path / f"{name}.tar", size)
    with tarfile.open(tmp_path / "c.test.tar") as tar:  # corpora in other forms
        tar.extractall(tmp_path, filter="data")
    (tmp_path / "c.test.tar").unlink()
    (tmp_path / "manifest.jsonl").rename(tmp_path / "c.test.jsonl")
    (tmp_path / "b.dev").mkdir()
    shutil.copy(tmp_path / "0.wav", tmp_path / "b.dev")
    (tmp_path / "b.dev" / "0.txt").write_text("Yes.")
    (tmp_path / "books.txt").write_text("Yes, yes.\nYes!\n" * 10)
    text = ("--text", tmp_path / "books.txt")
    more = ("--more", "1", *SMALL, "model.encoder_layers=4", "tokenizer.kind=char")
    done = run_recipe("english", "--speech", tmp_path, *text, *more, cwd=tmp_path, programs=programs)
    assert done.returncode == 0, done.stderr
    table = (tmp_path / "exp" / "english" / "RESULTS.md").read_text().splitlines()
    assert [row.split(" | ")[0] for row in table[2:]] == ["| a.dev", "| b.dev", "| c.test"]
    model = tmp_path / "exp" / "english" / "model"
    assert (model / "model.safetensors").is_file() and (model / "lm" / "model.safetensors").is_file()
    assert json.loads((model / "config.json").read_text())["model"]["encoder_layers"] == 4 + 4
    folders = (model.parent / "second" / "model", model.parent / "more" / "1" / "model", model)
    weights = [load_file(folder / "model.safetensors") for folder in folders]
    second, more, mean = (each["transformer.decoder.norm.bias"].float() for each in weights)
    assert not torch.equal(second, more)
    torch.testing.assert_close(mean, (second + more) / 2, atol=1e-5, rtol=1e-3)
    tuned = json.loads((model / "decoding.json").read_text())
    assert tuned["options"]["beam_size"] == 6
    assert tuned["int8"] == can_quantize(torch.device("cpu"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--speech", "nowhere"],
        ["--speech", ".", "--quick", "4"],
        ["--speech", ".", "--text", "nowhere"],
        ["--frobnicate"],
        ["--more", "x"],
    ],
)
def test_wrong_arguments_are_one_line_and_code_two(tmp_path, arguments):
    done = run_recipe("english", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("run.sh: ")
