"""fairseq's tokenizer: sentencepiece's pieces with the ids of a separate dictionary (Wang et al. 2020, S2T)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from asr.text.tokenizer import Tokenizer

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
UNKNOWN = SPECIAL.index("<unk>")


class Speech2TextTokenizer(Tokenizer):
    """Maps the pieces of a sentencepiece model to `ids`, of which `<s>`, `<pad>`, `</s>` and `<unk>` have the first."""

    file_name = "sentencepiece.bpe.model"
    dictionary = "vocab.json"

    def __init__(self, model: bytes, ids: dict[str, int]):
        from sentencepiece import SentencePieceProcessor

        self._model = model
        self._processor = SentencePieceProcessor(model_proto=model)
        self._ids = ids
        self._pieces = {i: piece for piece, i in ids.items()}
        if tuple(self._pieces.get(i) for i in range(len(SPECIAL))) != SPECIAL:
            raise ValueError(f"the dictionary must start with {', '.join(SPECIAL)}")

    @classmethod
    def load(cls, folder: str | Path) -> Speech2TextTokenizer:
        folder = Path(folder)
        ids = json.loads((folder / cls.dictionary).read_text(encoding="utf-8"))
        return cls((folder / cls.file_name).read_bytes(), ids)

    def encode(self, text: str) -> list[int]:
        return [self._ids.get(piece, UNKNOWN) for piece in self._processor.EncodeAsPieces(text)]

    def decode(self, ids: Iterable[int]) -> str:
        pieces = ["\ufffd" if i == UNKNOWN else self._pieces[i] for i in ids if i >= UNKNOWN]
        return self._processor.DecodePieces(pieces)

    def piece(self, token: int) -> str:
        return self._pieces[token]

    def lacks_some(self, ids: Sequence[int]) -> bool:
        return UNKNOWN in ids

    def save(self, folder: str | Path) -> None:
        folder = Path(folder)
        (folder / self.file_name).write_bytes(self._model)
        (folder / self.dictionary).write_text(json.dumps(self._ids, ensure_ascii=False), encoding="utf-8")

    def __len__(self) -> int:
        return len(self._ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Speech2TextTokenizer) and (self._model, self._ids) == (other._model, other._ids)
