"""Trains a language model for the search.

    python -m asr.train_lm tokenizer=exp/a/model 'data.train=[books.txt.xz]' out=exp/lm
    python -m asr.train_lm out=exp/lm resume=true

It reads text, one sentence per line, and transcripts (`data.transcripts`), with the normaliser and the tokenizer of the
recogniser that it is for. To use it: `python -m asr.transcribe --lm exp/lm/model ...`. Options use Hydra's syntax;
`--cfg job` shows the composed configuration.
"""

from __future__ import annotations

from asr.composition import training_command
from asr.training.config import LMTrainConfig


def main() -> None:
    training_command("asr.train_lm", LMTrainConfig, "asr.training.language_model:train_language_model")


if __name__ == "__main__":
    main()
