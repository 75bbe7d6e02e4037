"""Shared by the benchmarks: measures a row of a table in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def measured(command: list[str], threads: int) -> dict | str:
    """The JSON object that a Python command prints last, run on `threads` threads, or its last error line."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip() or f"killed ({done.returncode})").splitlines()[-1][:100]
    return json.loads(done.stdout.strip().splitlines()[-1])
