"""The README's commands and examples run, so that they cannot rot.

Trainings are shortened to one epoch of a tiny model; CI covers the setup of environments and the tests."""

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import tarfile

import pytest
import torch

from asr.model.foreign import OPENAI, OUTPUT, WhisperTask, _renamed, _whisper_config
from asr.model.transformer import Transformer
from asr.resources import resource
from asr.text.whisper import WhisperTokenizer
from tests.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
DIGITS = "[data/digits/dev.tar]"
WHISPER_DIMS = (("state", "d_model"), ("head", "num_heads"))
SHORT = [
    "epochs=1",
    "model.d_model=16",
    "model.num_heads=2",
    "model.encoder_layers=1",
    "validate_every=1",
    "validation.strategy=ctc",
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[2:] for line in lines if line.startswith("python -m asr.")]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder like a user's, with a few utterances of the shipped data, the user's own corpus and a recording."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "data" / "digits").mkdir(parents=True)
    with tarfile.open(resource("data", "digits", "dev.tar")) as shipped:
        lines = shipped.extractfile("manifest.jsonl").read().decode().splitlines()[:6]
        names = [json.loads(line)["audio_filepath"] for line in lines]
        for name in names:
            (folder / name).write_bytes(shipped.extractfile(name).read())
    for part in ("manifest", "train", "dev"):
        (folder / f"{part}.jsonl").write_text("\n".join(lines))
    with tarfile.open(folder / "data" / "digits" / "dev.tar", "w") as small:
        for name in ("manifest.jsonl", *names):
            small.add(folder / name, name)
    for samples in (folder / "data" / "samples", folder / "sounds"):
        shutil.copytree(resource("data", "samples"), samples)
    for name in ("talk.mp3", "file.wav", "a.wav", "b.wav"):  # the format is detected from the content
        shutil.copy(folder / names[0], folder / name)
    write_whisper(folder)
    return folder


def write_whisper(folder) -> None:
    """Writes `tiny.en.pt` as OpenAI does, but tinier and with random weights, and `gpt2.tiktoken` of the 256 bytes."""
    tokens = [bytes([i]) for i in range(256)]
    lines = [f"{base64.b64encode(token).decode()} {i}" for i, token in enumerate(tokens)]
    (folder / "gpt2.tiktoken").write_text("\n".join(lines))
    shape = {"input_dim": 80, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 2}
    config = _whisper_config(shape | {"ffn_dim": 64, "max_positions": 16}, WhisperTokenizer(tokens), WhisperTask())
    state = Transformer(config).state_dict()
    weights = {_renamed(name, OPENAI): tensor for name, tensor in state.items() if name != OUTPUT}
    weights["decoder.positional_embedding"] = weights.pop("decoder.positions.table.weight")
    dims = {f"n_{part}_{what}": shape[name] for part in ("audio", "text") for what, name in WHISPER_DIMS}
    dims |= {"n_mels": 80, "n_vocab": config.vocab_size, "n_text_ctx": 16}
    dims |= {f"n_{part}_layer": 1 for part in ("audio", "text")}
    torch.save({"dims": dims, "model_state_dict": weights}, folder / "tiny.en.pt")


def test_the_commands_run_in_order(workplace, programs):
    assert len(commands()) >= 8
    (workplace / "books.txt").write_text("one two three\nfour five six seven\n" * 20)
    environment = {**os.environ, "DRAW": "1"}
    for command in commands():
        if command[0] == "asr.train_lm":
            command = [*command, "epochs=1", "model.d_model=16", "model.num_heads=2", "model.decoder_layers=1"]
        if command[0] == "asr.pretrain":
            command = [*command, *(word for word in SHORT if not word.startswith("validation"))]
        if command[0] == "asr.train" and "--cfg" not in command:
            own = [] if any(word.startswith("data.train") for word in command) else [f"data.train={DIGITS}"]
            command = [*command, *own, *([f"data.dev={DIGITS}"] if own else []), *SHORT]
        words = [programs / "python", "-m", *command]
        done = subprocess.run(words, cwd=workplace, env=environment, capture_output=True)
        assert done.returncode == 0, (command, done.stderr.decode())


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not here")
def test_what_a_model_is_sure_of_becomes_a_corpus(tmp_path):
    (line,) = (line for block in blocks("bash") for line in block.splitlines() if " jq -c " in line)
    (tmp_path / "heard").mkdir()
    for name, more in {"sure": {}, "doubtful": {"confidence": 0.5}, "damaged": {"error": "broken off"}}.items():
        heard = {"file": f"{name}.flac", "text": "so it", "duration": 1.5, "confidence": 0.9, "segments": []}
        (tmp_path / "heard" / f"{name}.json").write_text(json.dumps(heard | more))
    subprocess.run(["bash", "-c", line], cwd=tmp_path, check=True)
    lines = (tmp_path / "heard.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [{"audio_filepath": "sure.flac", "text": "so it", "duration": 1.5}]


def test_the_python_examples_run(workplace, programs):
    for block in blocks("python"):
        done = subprocess.run([programs / "python", "-c", block], cwd=workplace, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_the_test_command_is_what_ci_runs():
    ci = (ROOT / ".ci" / "run").read_text()
    assert "pip install -q -e '.[test]'" in ci and "pip install -e '.[test]'" in README
    assert "python -m pytest" in ci and "python -m pytest" in README
