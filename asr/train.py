"""Trains a model.

    python -m asr.train                                         the tour: spoken digits, a few minutes on a CPU
    python -m asr.train experiment=an4 'data.train=[a.jsonl]' 'data.dev=[b.jsonl]'   a shipped experiment on your data
    python -m asr.train model=conformer-s epochs=60 out=exp/a   any option of asr/training/config.py
    python -m asr.train out=exp/a resume=true                   continues from the last checkpoint

Options use Hydra's syntax; `python -m asr.train --help` lists them all, `--cfg job` shows the composed configuration.
"""

from __future__ import annotations

from asr.composition import training_command
from asr.training.config import TrainConfig


def main() -> None:
    training_command("asr.train", TrainConfig, "asr.training.run:train")


if __name__ == "__main__":
    main()
