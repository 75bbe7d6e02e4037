"""Training an encoder on sound without transcripts (BEST-RQ); a recogniser begins from it.

    python -m asr.pretrain 'data.train=[sound/]' 'data.dev=[more-sound/]' out=exp/encoder
    python -m asr.pretrain out=exp/encoder resume=true
    python -m asr.train experiment=small init_from=exp/encoder/model 'data.train=[...]' 'data.dev=[...]' out=exp/a

Options are Hydra's: `--cfg job` shows them composed.
"""

from __future__ import annotations

from asr.composition import training_command
from asr.training.config import PretrainConfig


def main() -> None:
    training_command("asr.pretrain", "pretrain", PretrainConfig, _pretrain)


def _pretrain(config: PretrainConfig) -> None:
    from asr.training.pretraining import pretrain  # heavy: --help and --cfg do without it

    pretrain(config)


if __name__ == "__main__":
    main()
