"""Fixtures that the tests share: synthetic audio, a tiny model, and the real speech where it is available."""

import gc
import os
import signal
import socket
import threading

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # `CUDA_VISIBLE_DEVICES=0 pytest` uses a GPU
if not os.environ["CUDA_VISIBLE_DEVICES"]:
    os.environ["TRITON_INTERPRET"] = "1"  # runs GPU kernels without a GPU
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from asr.audio.config import FeatureConfig
from asr.audio.reading import SAMPLE_RATE
from asr.decode.confidence import Calibration
from asr.decode.options import DecodeOptions
from asr.decode.recognizer import Recognizer
from asr.decode.tuning import save_tuning
from asr.heap import keep_kernels
from asr.model.config import ModelConfig
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from asr.text.tokenizer import CharTokenizer
from tests import forks
from tests.kinds import TINY
from tests.training.tones import write_sets

ROOT = forks.ROOT
LETTERS = " 'abcdefghijklmnopqrstuvwxyz"

torch.set_num_threads(1)  # there are as many test processes as cores
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the commands
keep_kernels(1024)  # loading a recogniser would keep too few for the training tests of the same process


def pytest_configure() -> None:
    gc.disable()  # until everything is imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs trainings and the README's commands first: so no test process waits for another's slow file at the end."""
    items.sort(key=lambda item: item.path.parent.name != "training" and item.path.name != "test_readme.py")


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_plots(monkeypatch) -> None:
    """Has trainings draw nothing, except for models that several tests share."""
    for name, nothing in forks.PICTURES.items():
        monkeypatch.setattr(name, nothing)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Makes Ctrl-C work as in a terminal: a process in the background may have been started without it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def tone():
    """Makes a tone: `tone(seconds, hertz)` -> samples `(N,)` at 16 kHz."""

    def make(seconds: float = 1.0, hertz: float = 440.0) -> np.ndarray:
        t = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
        return (0.3 * np.sin(2 * np.pi * hertz * t)).astype(np.float32)

    return make


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A corpus of tones, in the folders train and dev."""
    return write_sets(tmp_path_factory.mktemp("tones"), 30, 6)


def write_librispeech(part: Path, utterances: int) -> None:
    """Writes a part of LibriSpeech in its own layout: one-second utterances of noise, by two speakers."""
    rng = np.random.default_rng(utterances)
    for speaker in ("19", "26"):
        chapter = part / speaker / "198"
        chapter.mkdir(parents=True)
        names = [f"{speaker}-198-{i:04d}" for i in range(utterances // 2)]
        for name in names:
            soundfile.write(chapter / f"{name}.flac", rng.normal(0, 0.1, SAMPLE_RATE), SAMPLE_RATE)
        lines = "".join(f"{name} YES NO\n" for name in names)
        (chapter / f"{speaker}-198.trans.txt").write_text(lines)


@pytest.fixture
def tiny_config() -> ModelConfig:
    return TINY


@pytest.fixture
def tiny_model(tiny_config) -> SpeechModel:
    """A model with random weights and 28 letters."""
    return SpeechModel(FeatureConfig(), Transformer(tiny_config), CharTokenizer(LETTERS)).eval()


@pytest.fixture
def noise_is_heard(monkeypatch) -> None:
    """Has CTC hear something in any input: random weights are sure of nothing, and would give empty transcripts."""
    for module in ("recognizer", "graphs", "onnx"):
        monkeypatch.setattr(f"asr.decode.{module}.hears_something", lambda log_probs, lens: lens > 0)


@pytest.fixture(autouse=True)
def noise_is_speech(monkeypatch) -> None:
    """Counts any audio as speech: random weights doubt every word, and the audio of the tests contains no speech."""
    monkeypatch.setattr("asr.decode.recognizer.has_speech", lambda samples: True)


def sure_of_what_it_hears(model: Path) -> None:
    """Has the effect of `noise_is_speech` in a separate process."""
    save_tuning(model, DecodeOptions(), Calibration(bias=10.0, mean=0.0, least=0.0))


@pytest.fixture(scope="session")
def programs() -> Iterator[Path]:
    """A folder whose `python` starts at once (`tests/forks.py`)."""
    with forks.programs() as folder:
        yield folder


@pytest.fixture(scope="session")
def speech() -> Path:
    """The folder of real speech next to the checkout; tests that need it are skipped without it."""
    folder = ROOT.parent / "shared" / "speech"
    if not folder.is_dir():
        pytest.skip("the real speech (../shared/speech) is not here")
    return folder


@pytest.fixture
def files(tmp_path, tiny_model):
    """A folder with a model, two recordings of one second, and their transcripts."""
    with torch.no_grad():
        tiny_model.transformer.ctc.weight.mul_(20)  # it is sure of what it hears in noise
    tiny_model.save(tmp_path / "model")
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        soundfile.write(tmp_path / f"{name}.wav", rng.normal(0, 0.1, SAMPLE_RATE), SAMPLE_RATE)
        (tmp_path / f"{name}.txt").write_text("one two")
    return tmp_path


@pytest.fixture
def served(files) -> Recognizer:
    """The recogniser of the `server`."""
    sure_of_what_it_hears(files / "model")
    return Recognizer.load(files / "model", "cpu", precision="float32", word_times=True)


@pytest.fixture
def server(served) -> Iterator[str]:
    """The address of a server whose requests may have at most 1 MiB."""
    import uvicorn

    from asr.service import Limits, application

    app = application(served, "exp/tiny", Limits(at_once=2, waiting=30, mib=1.0, seconds=30.0, streams=2))
    listening = socket.create_server(("127.0.0.1", 0))
    running = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    running.should_exit = True
    thread.join()
