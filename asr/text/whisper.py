"""Whisper's tokenizer: byte-level BPE, followed by the tokens that say what is to be written (Radford et al. 2022)."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from asr.text.tokenizer import Tokenizer

PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"  # GPT-2's words
LANGUAGES = (  # noqa: SIM905
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi ml "
    "cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd gu am "
    "yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue"
).split()
TASKS = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
ENGLISH_TOKENS = 50256  # of text: the English-only models have GPT-2's vocabulary
LANGUAGES_OF = {ENGLISH_TOKENS: (99,), ENGLISH_TOKENS + 1: (99, 100)}  # of OpenAI's vocabularies: English, multilingual
TIMESTAMPS = 1501  # 0 to 30 s in steps of 0.02 s
# symbols that stand for sounds and speakers, not for speech
SYMBOLS = [
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    *"<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪".split(),  # noqa: SIM905
]
NOTES = [*"♩♪♫♬♭♮♯"]


class WhisperTokenizer(Tokenizer):
    """Bytes of UTF-8, `tokens` by their ids; then `<|endoftext|>`, `<|startoftranscript|>`, languages, tasks, times."""

    file_name = "whisper.json"

    def __init__(self, tokens: list[bytes], languages: int = 99):
        if len(set(tokens)) != len(tokens) or not 0 <= languages <= len(LANGUAGES):
            raise ValueError("tokens must be distinct, languages no more than Whisper has")
        self.tokens = tokens
        names = ["endoftext", "startoftranscript", *LANGUAGES[:languages], *TASKS]
        self.special = {name: i for i, name in enumerate(names, len(tokens))}
        self.languages = languages

    @classmethod
    def from_file(cls, path: str | Path, vocab_size: int) -> WhisperTokenizer:
        """The tokenizer of a model with `vocab_size` tokens, from its `.tiktoken` file or its `vocab.json`.

        Raises ValueError if the file is not a vocabulary, or does not fit that size."""
        path = Path(path)
        try:
            if path.suffix == ".json":
                ids = json.loads(path.read_text(encoding="utf-8"))
                plain = _byte_of_character()
                kept = [piece for piece in sorted(ids, key=ids.__getitem__) if not piece.startswith("<|")]
                tokens = [bytes(plain[character] for character in piece) for piece in kept]
            else:
                lines = [line.split() for line in path.read_text().splitlines() if line]
                tokens = [base64.b64decode(token) for token, _ in sorted(lines, key=lambda line: int(line[1]))]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not a byte-level vocabulary ({error})") from None
        languages = vocab_size - len(tokens) - 2 - len(TASKS) - TIMESTAMPS
        known = LANGUAGES_OF.get(len(tokens), range(len(LANGUAGES) + 1))
        if languages not in known:
            raise ValueError(f"{path}: {len(tokens)} tokens do not fit a model of {vocab_size}")
        return cls(tokens, languages)

    @property
    def is_multilingual(self) -> bool:
        return len(self.tokens) != ENGLISH_TOKENS

    def prompt(self, language: str = "en", task: str = "transcribe", timestamps: bool = False) -> list[int]:
        """The ids that the decoder reads first. Raises ValueError for a language or task that the model lacks."""
        known = LANGUAGES[: self.languages]
        if language not in known or task not in ("transcribe", "translate"):
            raise ValueError(f"this model knows no {language!r} / {task!r}; languages: {', '.join(known)}")
        if not self.is_multilingual and (language, task) != ("en", "transcribe"):
            raise ValueError("this model transcribes English only")
        told = [language, task] if self.is_multilingual else []
        names = ["startoftranscript", *told, *([] if timestamps else ["notimestamps"])]
        return [self.special[name] for name in names]

    @property
    def first_timestamp(self) -> int:
        return self.special["notimestamps"] + 1

    @property
    def eos(self) -> int:
        return self.special["endoftext"]

    def suppressed(self, timestamps: bool = False) -> list[int]:
        """The ids that do not occur in a transcript: special tokens, symbols that do not stand for speech, and times,
        unless `timestamps`."""
        found = set(range(self.eos + 1, self.first_timestamp if timestamps else len(self)))
        found |= {self._encoding.encode_ordinary(text)[0] for text in (" -", " '")}
        for symbol in SYMBOLS + NOTES:
            for ids in (self._encoding.encode_ordinary(text) for text in (symbol, f" {symbol}")):
                if len(ids) == 1 or symbol in NOTES:
                    found.add(ids[0])
        return sorted(found)

    def suppressed_first(self) -> list[int]:
        """The ids that do not start a transcript: a lone space, the end."""
        return [*self._encoding.encode_ordinary(" "), self.eos]

    @cached_property
    def _encoding(self):
        try:
            import tiktoken
        except ImportError:
            raise ValueError("Whisper's tokenizer needs tiktoken: pip install '.[whisper]'") from None
        ranks = {token: rank for rank, token in enumerate(self.tokens)}
        return tiktoken.Encoding("whisper", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, which starts with a space, as in Whisper's training."""
        return self._encoding.encode_ordinary(" " + text.strip())

    def decode(self, ids: Iterable[int]) -> str:
        return b"".join(self.tokens[i] for i in ids if i < len(self.tokens)).decode("utf-8", errors="replace")

    def piece(self, token: int) -> str:
        """As `Tokenizer.piece`; bytes that are not a whole character are written as \\xe2, times as <|0.02|>."""
        if token < len(self.tokens):
            return self.tokens[token].decode("utf-8", errors="backslashreplace").replace(" ", "\u2581")
        names = [*self.special, *(f"{time * 0.02:.2f}" for time in range(TIMESTAMPS))]
        return f"<|{names[token - len(self.tokens)]}|>"

    def save(self, folder: str | Path) -> None:
        tokens = [base64.b64encode(token).decode() for token in self.tokens]
        text = json.dumps({"languages": self.languages, "tokens": tokens})
        (Path(folder) / self.file_name).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> WhisperTokenizer:
        saved = json.loads((Path(folder) / cls.file_name).read_text(encoding="utf-8"))
        return cls([base64.b64decode(token) for token in saved["tokens"]], saved["languages"])

    def __len__(self) -> int:
        return len(self.tokens) + len(self.special) + TIMESTAMPS

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WhisperTokenizer) and (self.tokens, self.languages) == (other.tokens, other.languages)


def _byte_of_character() -> dict[str, int]:
    """The bytes by GPT-2's characters: those printable in Latin-1 as they are, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
