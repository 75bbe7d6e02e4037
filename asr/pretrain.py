"""Trains an encoder on audio without transcripts (BEST-RQ), from which a recogniser can start.

    python -m asr.pretrain 'data.train=[sound/]' 'data.dev=[more-sound/]' out=exp/encoder
    python -m asr.pretrain out=exp/encoder resume=true
    python -m asr.train experiment=small init_from=exp/encoder/model 'data.train=[...]' 'data.dev=[...]' out=exp/a

Options use Hydra's syntax; `--cfg job` shows the composed configuration.
"""

from __future__ import annotations

from asr.composition import training_command
from asr.training.config import PretrainConfig


def main() -> None:
    training_command("asr.pretrain", PretrainConfig, "asr.training.pretraining:pretrain")


if __name__ == "__main__":
    main()
