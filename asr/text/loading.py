"""Saving and loading tokenizers of any kind."""

from __future__ import annotations

from pathlib import Path

from asr.text.speech2text import Speech2TextTokenizer
from asr.text.tokenizer import CharTokenizer, SubwordTokenizer, Tokenizer
from asr.text.whisper import WhisperTokenizer

KINDS = (CharTokenizer, SubwordTokenizer, WhisperTokenizer, Speech2TextTokenizer)


def save_tokenizer(tokenizer: Tokenizer, folder: str | Path) -> None:
    """Writes a tokenizer into a folder, replacing any other one there."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        if not isinstance(tokenizer, kind):
            (Path(folder) / kind.file_name).unlink(missing_ok=True)
    tokenizer.save(folder)


def check_size(tokenizer: Tokenizer, size: int) -> None:
    """Raises ValueError if a model of `size` tokens cannot write with the tokenizer."""
    if len(tokenizer) != size:
        raise ValueError(f"the tokenizer has {len(tokenizer)} tokens, the model {size}")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer in a model folder. Raises FileNotFoundError if there is none."""
    for kind in KINDS:
        if (Path(folder) / kind.file_name).is_file():
            return kind.load(folder)
    raise FileNotFoundError(f"{folder}: no tokenizer ({', '.join(kind.file_name for kind in KINDS)})")
