"""Training.

    python -m asr.train                                         the tour: spoken digits, a few minutes on a CPU
    python -m asr.train experiment=an4 'data.train=[a.jsonl]' 'data.dev=[b.jsonl]'   a shipped experiment on your data
    python -m asr.train model=conformer-s epochs=60 out=exp/a   any option of asr/training/config.py
    python -m asr.train out=exp/a resume=true                   goes on where the last checkpoint is

Options are Hydra's: `python -m asr.train --help` lists them all, `--cfg job` shows them composed.
"""

from __future__ import annotations

from asr.composition import training_command
from asr.training.config import TrainConfig


def main() -> None:
    training_command("asr.train", "train", TrainConfig, _train)


def _train(config: TrainConfig) -> None:
    from asr.training.run import train  # heavy: --help and --cfg do without it

    train(config)


if __name__ == "__main__":
    main()
