from pathlib import Path

import pytest

from asr.training.run import train
from tests.training.tones import options, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tones")
    write_corpus(folder / "train", 60, seed=1)
    write_corpus(folder / "dev", 12, seed=2)
    return folder


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory) -> tuple[Path, float]:
    out = tmp_path_factory.mktemp("exp")
    return train(options(corpus, out, "epochs=40", "validate_every=10"))
