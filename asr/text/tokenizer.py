"""Tokenizers: text to ids and back, behind one small interface.

Every vocabulary trained here starts with the same four symbols, so that blank, unknown, start and end always have the
same ids: 0 `<blank>` (CTC), 1 `<unk>`, 2 `<sos>`, 3 `<eos>`. Characters are the default (any script);
`SubwordTokenizer` wraps a sentencepiece model.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from pathlib import Path

from asr.text.words import begins_word

BLANK, UNK, SOS, EOS = 0, 1, 2, 3
SPECIALS = ("<blank>", "<unk>", "<sos>", "<eos>")


class Tokenizer(ABC):
    """Converts text to a list of ids and back. `len(tokenizer)` is V, including the special symbols."""

    file_name: str

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without start and end; what the vocabulary lacks becomes `UNK`."""

    @abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; blank, start and end are left out, unknown is written as U+FFFD."""

    @abstractmethod
    def piece(self, token: int) -> str:
        """The text of a token, with U+2581 for a space; for a special symbol, its name."""

    def lacks_some(self, ids: Sequence[int]) -> bool:
        """Whether `ids`, encoded from a text, include a character that this tokenizer cannot write."""
        return UNK in ids and self.piece(UNK) == SPECIALS[UNK]  # Whisper's tokenizer writes all

    def words(self, ids: Sequence[int]) -> list[tuple[str, slice]]:
        """The words of `ids`, each with the slice of `ids` that writes it, including the space before it; in scripts
        without spaces, most tokens are a word."""
        pieces = [self.piece(token) for token in ids]
        begins = (i for i, (before, piece) in enumerate(pairwise(pieces), 1) if begins_word(piece, before))
        parts = [slice(first, end) for first, end in pairwise([0, *begins, len(ids)])]
        return [(word, part) for part in parts if (word := self.decode(ids[part]).strip())]

    @abstractmethod
    def save(self, folder: str | Path) -> None:
        """Writes `folder / self.file_name`."""

    @abstractmethod
    def __len__(self) -> int: ...


class CharTokenizer(Tokenizer):
    """One id per character (Unicode code point), including the space."""

    file_name = "characters.json"

    def __init__(self, characters: Sequence[str]):
        if len(set(characters)) != len(characters) or any(len(c) != 1 for c in characters):
            raise ValueError("characters must be distinct and of length 1")
        self.characters = list(characters)
        self._ids = {c: i for i, c in enumerate(self.characters, len(SPECIALS))}

    @classmethod
    def train(cls, texts: Iterable[str]) -> CharTokenizer:
        """The vocabulary of all characters of `texts`, in code point order."""
        return cls(sorted(set(chain.from_iterable(texts))))

    @classmethod
    def load(cls, folder: str | Path) -> CharTokenizer:
        return cls(json.loads((Path(folder) / cls.file_name).read_text(encoding="utf-8")))

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(c, UNK) for c in text]

    def decode(self, ids: Iterable[int]) -> str:
        first = len(SPECIALS)
        return "".join(self.characters[i - first] if i >= first else "\ufffd" for i in ids if i >= first or i == UNK)

    def piece(self, token: int) -> str:
        first = len(SPECIALS)
        return SPECIALS[token] if token < first else self.characters[token - first].replace(" ", "\u2581")

    def save(self, folder: str | Path) -> None:
        text = json.dumps(self.characters, ensure_ascii=False)
        (Path(folder) / self.file_name).write_text(text, encoding="utf-8")

    def __len__(self) -> int:
        return len(SPECIALS) + len(self.characters)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CharTokenizer) and self.characters == other.characters


class SubwordTokenizer(Tokenizer):
    """Subwords of sentencepiece (Kudo & Richardson 2018), by byte-pair encoding (Sennrich et al. 2016) or a unigram
    model (Kudo 2018)."""

    file_name = "sentencepiece.model"

    def __init__(self, model: bytes):
        from sentencepiece import SentencePieceProcessor

        self._model = model
        self._processor = SentencePieceProcessor(model_proto=model)
        pieces = tuple(self._processor.IdToPiece(i) for i in range(len(SPECIALS)))
        if pieces != SPECIALS:
            raise ValueError(f"a sentencepiece model must start with {SPECIALS}, this one starts with {pieces}")

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, kind: str = "bpe") -> SubwordTokenizer:
        """Trains on normalised `texts`; `kind` is bpe or unigram, `vocab_size` includes the four special symbols.
        Raises ValueError if the texts have too few subwords for `vocab_size`, or too many characters."""
        import io

        from sentencepiece import SentencePieceTrainer

        model = io.BytesIO()
        try:
            SentencePieceTrainer.Train(
                sentence_iterator=iter(texts),
                model_writer=model,
                vocab_size=vocab_size,
                model_type=kind,
                character_coverage=1.0,
                max_sentence_length=2**30,  # bytes; longer texts would be left out
                normalization_rule_name="identity",
                pad_id=BLANK,
                unk_id=UNK,
                bos_id=SOS,
                eos_id=EOS,
                pad_piece=SPECIALS[BLANK],
                unk_piece=SPECIALS[UNK],
                bos_piece=SPECIALS[SOS],
                eos_piece=SPECIALS[EOS],
                minloglevel=2,
            )
        except RuntimeError as error:
            reason = f"sentencepiece says {error}"
            if most := re.search(r"value <= (\d+)", str(error)):
                reason = f"these texts have {most[1]} subwords at most"
            elif "required_chars" in str(error):
                reason = "these texts have more characters than that"
            raise ValueError(f"tokenizer.vocab_size={vocab_size}: {reason}") from None
        return cls(model.getvalue())

    @classmethod
    def load(cls, folder: str | Path) -> SubwordTokenizer:
        return cls((Path(folder) / cls.file_name).read_bytes())

    def encode(self, text: str) -> list[int]:
        return self._processor.Encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        text = self._processor.Decode([i for i in ids if i not in (BLANK, SOS, EOS)])
        return text.replace(" \u2047 ", "\ufffd")

    def piece(self, token: int) -> str:
        return self._processor.IdToPiece(token)

    def save(self, folder: str | Path) -> None:
        (Path(folder) / self.file_name).write_bytes(self._model)

    def __len__(self) -> int:
        return self._processor.GetPieceSize()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SubwordTokenizer) and self._model == other._model
