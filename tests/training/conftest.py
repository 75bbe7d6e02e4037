import os
from pathlib import Path

import pytest
from filelock import FileLock

from asr.training.run import train
from tests.training.tones import options


@pytest.fixture(scope="session")
def trained(corpus, tmp_path_factory) -> tuple[Path, float]:
    """A model and its WER on dev, shared by all test processes."""
    own = tmp_path_factory.getbasetemp()
    out = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "trained"
    with FileLock(f"{out}.lock"):
        if not (out / "wer").exists():
            _, wer = train(options(corpus, out, "epochs=40", "validate_every=10"))
            (out / "wer").write_text(str(wer))
    return out / "model", float((out / "wer").read_text())
