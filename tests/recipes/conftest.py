import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

SMALL = ["epochs=1", "validate_every=1", "model.d_model=16", "model.encoder_layers=1", "model.decoder_layers=1"]


def run_recipe(name: str, *arguments, cwd: Path, programs: Path | None = None) -> subprocess.CompletedProcess:
    """Runs the recipe with the `python` in the folder `programs`, by default the one that runs the tests."""
    path = f"{programs or Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    command = ["bash", ROOT / "recipes" / name / "run.sh", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
