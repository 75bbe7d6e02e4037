from pathlib import Path

import pytest

from asr.training.run import train
from tests.training.tones import options


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory) -> tuple[Path, float]:
    out = tmp_path_factory.mktemp("exp")
    return train(options(corpus, out, "epochs=40", "validate_every=10"))
