import os
from pathlib import Path

import pytest
from filelock import FileLock

from asr.training.run import train
from tests.training.tones import options, write_sets


@pytest.fixture(scope="session")
def larger(tmp_path_factory) -> Path:
    """A corpus like `corpus`, large enough to learn the tones from."""
    return write_sets(tmp_path_factory.mktemp("larger"), 60, 12)


@pytest.fixture(scope="session")
def trained(larger, tmp_path_factory) -> tuple[Path, float]:
    """A model of `larger` and its WER on dev, shared by all test processes."""
    own = tmp_path_factory.getbasetemp()
    out = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "trained"
    with FileLock(f"{out}.lock"):
        if not (out / "wer").exists():
            _, wer = train(options(larger, out, "epochs=24", "validate_every=6"))
            (out / "wer").write_text(str(wer))
    return out / "model", float((out / "wer").read_text())
