"""Text normalisation, applied to both sides of every score and to every training transcript.

`english` writes numbers as words and keeps the letters a-z and the apostrophe; `neutral` suits any script (NFKC,
lower case, no punctuation). A normaliser is a plain function; its name travels with the model.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

Normalizer = Callable[[str], str]

_JOINERS = "\u200c\u200d"  # between the letters of a word in several scripts
_MARKS = (  # hyphenation, direction, variants of emoji
    "\u00ad\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2060\u2066\u2067\u2068\u2069\ufeff\ufe0e\ufe0f\u20e3"
)
_PARTS = {
    "½": "a half", "¼": "a quarter", "¾": "three quarters", "⅓": "a third", "⅔": "two thirds", "⅕": "a fifth",
    "⅖": "two fifths", "⅗": "three fifths", "⅘": "four fifths", "⅙": "a sixth", "⅚": "five sixths",
    "⅛": "an eighth", "⅜": "three eighths", "⅝": "five eighths", "⅞": "seven eighths",
}  # fmt: skip
# applied before NFKC, which turns ´ into a space and an accent, 10² into 102 and 5½ into 51⁄2
_TIDY = {
    **dict.fromkeys(map(ord, "’‘ʼ`´′＇"), "'"),
    **dict.fromkeys(map(ord, _MARKS)),
    **dict.fromkeys(map(ord, "\u200b⁰¹²³⁴⁵⁶⁷⁸⁹"), " "),
    **{ord(part): f" {part}" for part in _PARTS},
}
_TIDY_ENGLISH = {**_TIDY, **dict.fromkeys(map(ord, _JOINERS))}
# letters that NFKD does not decompose
_LETTERS = str.maketrans({"æ": "ae", "œ": "oe", "ø": "o", "ß": "ss", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "ı": "i"})
_CURRENCIES = {"$": ("dollar", "cent", "cents"), "£": ("pound", "penny", "pence"), "€": ("euro", "cent", "cents")}
_NUMBER = re.compile(
    r"(?P<currency>[$£€])?\s?(?P<number>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)"
    r"(?(currency)(?P<scale>[\s-](?:thousand|million|billion|trillion)\b)?)(?P<suffix>(?:st|nd|rd|th)\b|'?s\b|\s?%"
    r"|\s?[$£€](?!\s?\.?\d))?"
)
_FRACTION = re.compile(rf"(?P<whole>(?<=\d)\s{{1,2}})?(?P<part>[{''.join(_PARTS)}])")
_INSIDE = f"'{_JOINERS}"
_SYMBOLS = {"&": " and ", "%": " percent ", "+": " plus ", "=": " equals ", "@": " at "}


def english(text: str) -> str:
    """Lower-case words of a-z and inner apostrophes, digits as words: `"It's 25% of $3.50!"` -> `it's twenty five
    percent of three dollars fifty cents`. Accents are dropped; anything else becomes a space."""
    text = text.replace("`", "'")
    if not text.isascii():
        text = unicodedata.normalize("NFKC", _FRACTION.sub(_spoken_fraction, text.translate(_TIDY_ENGLISH)))
    text = text.lower()
    if re.search(r"\d", text):  # a third of the time for the texts that have no digit
        text = _NUMBER.sub(_spoken_number, text)
    for symbol, word in _SYMBOLS.items():
        text = text.replace(symbol, word)
    if not text.isascii():
        text = unicodedata.normalize("NFKD", text.translate(_LETTERS))
        text = "".join(c for c in text if not unicodedata.combining(c))
    text = re.sub(r"[^a-z']+", " ", text)
    text = re.sub(r"(?<![a-z])'+|'+(?![a-z])", " ", text)  # quotation marks; only apostrophes inside a word stay
    return " ".join(text.split())


def neutral(text: str) -> str:
    """Any script: NFKC, lower case, punctuation and symbols to spaces, inner apostrophes and joiners kept, single
    spaces."""
    text = unicodedata.normalize("NFKC", text.translate(_TIDY)).lower()
    text = "".join(c if c in _INSIDE or unicodedata.category(c)[0] in "LMN" else " " for c in text)
    text = re.sub(rf"(?:(?<!\w)'|'(?!\w)|(?<!\S))[{_JOINERS}]*", " ", text)
    return " ".join(text.split())


def identity(text: str) -> str:
    """Only collapses spaces: for text that is already as the model should write it."""
    return " ".join(text.split())


NORMALIZERS: dict[str, Normalizer] = {"english": english, "neutral": neutral, "none": identity}


def get_normalizer(name: str) -> Normalizer:
    """The normaliser called `name`. Raises ValueError naming the choices."""
    if name not in NORMALIZERS:
        raise ValueError(f"normalizer: {name!r} is not one of {', '.join(NORMALIZERS)}")
    return NORMALIZERS[name]


def _spoken_number(match: re.Match[str]) -> str:
    from num2words import num2words  # only texts with digits pay for the import

    number, suffix = match["number"].replace(",", ""), (match["suffix"] or "").strip()
    number = f"0{number}" if number.startswith(".") else number
    currency = match["currency"] or (suffix if suffix in _CURRENCIES else None)
    whole, point, part = number.partition(".")
    if len(whole) > 15 or (len(whole) > 1 and whole.startswith("0")):
        words = " ".join(num2words(int(d)) if d != "." else "point" for d in number)
    elif match["scale"]:
        words = f"{english(number)} {match['scale'][1:]} {_CURRENCIES[match['currency']][0]}s"
    elif currency:
        words = _money(number, *_CURRENCIES[currency])
    elif point:
        words = " ".join([num2words(int(whole)), "point", *(num2words(int(digit)) for digit in part)])
    elif suffix in ("st", "nd", "rd", "th"):
        words = num2words(int(whole), to="ordinal")
    elif re.fullmatch(r"1[1-9]\d\d|20[1-9]\d", match["number"]):
        words = num2words(int(whole), to="year")
    else:
        words = num2words(int(whole))
    if suffix == "'s" and not whole.endswith("0"):  # the 11's crew, but the 1990's
        words += suffix
    elif suffix in ("s", "'s") and not match["currency"]:
        words = words[:-1] + "ies" if words.endswith("y") else words + ("es" if words.endswith("x") else "s")
    if suffix == "%":
        words += " percent"
    return f" {words} ".replace("-", " ").replace(",", "")


def _spoken_fraction(match: re.Match[str]) -> str:
    return f"{'' if match['whole'] is None else ' and'} {_PARTS[match['part']]} "


def _money(amount: str, unit: str, hundredth: str, hundredths: str) -> str:
    from num2words import num2words

    whole, _, part = amount.partition(".")
    cents = int(part.ljust(2, "0")[:2]) if part else 0
    words = [f"{num2words(int(whole))} {unit}{'' if int(whole) == 1 else 's'}"] if int(whole) or not cents else []
    return " ".join([*words, *([f"{num2words(cents)} {hundredth if cents == 1 else hundredths}"] if cents else [])])
