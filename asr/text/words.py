"""Where words start: after a space and, in scripts that are written without spaces, at every letter, because words are
a matter of dictionaries there."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

SPACE = "\u2581"  # stands for a space in a token
UNKNOWN = "\ufffd"  # stands for a letter that no token writes
# Thai, Lao; Burmese; Khmer; kana; Han, without their marks and signs, which belong to the letter before
UNSPACED = re.compile(
    "[\u0e01-\u0e30\u0e32\u0e33\u0e40-\u0e45\u0e81-\u0eb0\u0eb2\u0eb3\u0ec0-\u0ec4\u1000-\u102a\u1780-\u17b3"
    "\u3041-\u3096\u30a1-\u30fa\uff66-\uff6f\uff71-\uff9d\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
OPENING = "「『（【《〈〔"
CLOSING = "、。，．！？：；」』）】》〉〕"


def is_unspaced(character: str) -> bool:
    """Whether `character` is a letter of a script that is written without spaces."""
    return UNSPACED.fullmatch(character) is not None


def begins_word(text: str, before: str) -> bool:
    """Whether `text`, a token or a part of one, starts a word when it comes right after `before`; neither is empty, and
    U+2581 stands for a space in both."""
    first, last = text[0], before[-1]
    if first == SPACE or first in OPENING:
        return True
    if last in OPENING:
        return False
    other = first.isalnum() and unicodedata.category(first) != "Lm"  # Lm lengthens or repeats the letter before
    return is_unspaced(first) or (other and (is_unspaced(last) or last in CLOSING))


def join_words(words: Iterable[str]) -> str:
    """Joins words as they are written one after another, with spaces where their scripts have them."""
    text = ""
    for word in filter(None, words):
        text += word if not text or begins_word(word, text) else f" {word}"
    return text


def as_written(words: list[str], text: str) -> list[str]:
    """The `words` as they are in `text`; U+FFFD in them stands for letters that a vocabulary lacks."""
    if not any(UNKNOWN in word for word in words):
        return words
    parts, spaced = [re.escape(word).replace(UNKNOWN, ".+?") for word in words], text.split()
    if len(parts) == len(spaced) and all(map(re.fullmatch, parts, spaced)):
        return spaced
    found = re.fullmatch(r"\s*".join(f"({part})" for part in parts), text)
    return [part.strip() for part in found.groups()] if found else words


def split_words(text: str) -> list[str]:
    """Splits a text into words, and scripts without spaces into letters."""
    words: list[str] = []
    for part in text.split():
        first = len(words)
        for character in part:
            if len(words) == first or begins_word(character, words[-1]):
                words.append(character)
            else:
                words[-1] += character
    return words
