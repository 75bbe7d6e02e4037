from pathlib import Path

import pytest

from asr.training.run import train
from tests.training.tones import options


@pytest.fixture(autouse=True)
def no_curves(monkeypatch) -> None:
    """To draw them takes a third of a tiny training; those of `trained` and of the commands are drawn."""
    monkeypatch.setattr("asr.training.report._plots", lambda panels: "")


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory) -> tuple[Path, float]:
    out = tmp_path_factory.mktemp("exp")
    return train(options(corpus, out, "epochs=40", "validate_every=10"))
