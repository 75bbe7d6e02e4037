import pytest

from asr.text.normalizer import english, get_normalizer, neutral


@pytest.mark.parametrize(
    ("written", "spoken"),
    [
        ("HELLO, World!", "hello world"),
        ("It’s Bob's", "it's bob's"),
        ("'quoted' words, the boys' dogs", "quoted words the boys dogs"),
        ("a ''quoted''word", "a quoted word"),
        ("25%", "twenty five percent"),
        ("$3.50 and £1", "three dollars fifty cents and one pound"),
        (
            "50€, 3.50 € or 1,000$ and $20 €30",
            "fifty euros three euros fifty cents or one thousand dollars and twenty dollars thirty euros",
        ),
        ("£3.50, $1.01 and £2.01", "three pounds fifty pence one dollar one cent and two pounds one penny"),
        ("In 1999 and 2024", "in nineteen ninety nine and twenty twenty four"),
        ("the 21st, the 3rd", "the twenty first the third"),
        ("1,234 men", "one thousand two hundred and thirty four men"),
        ("3.14", "three point one four"),
        ("Version 2.0, 1,000.10", "version two point zero one thousand point one zero"),
        ("THE 1ST OF THE 1990S", "the first of the nineteen nineties"),
        ("agent 007", "agent zero zero seven"),
        ("1" * 16, " ".join(["one"] * 16)),
        ("the 80s, three 6s", "the eighties three sixes"),
        ("the 1990's, Apollo 11's crew", "the nineteen nineties apollo eleven's crew"),
        ("$3 million, $2.5 billion", "three million dollars two point five billion dollars"),
        ("2½ miles, ¾ full, 3 ¼", "two and a half miles three quarters full three and a quarter"),
        ("2⅓ cups, 5⅞ inches, ⅔", "two and a third cups five and seven eighths inches two thirds"),
        (".5 percent of $.50 or $0.50", "zero point five percent of fifty cents or fifty cents"),
        ("a $3-million house", "a three million dollars house"),
        ("10² words¹", "ten words"),
        ("Encyclopædia, ŒUVRE, Søren, Straße, Łódź", "encyclopaedia oeuvre soren strasse lodz"),
        ("$1,000s of it", "one thousand dollars of it"),
        ("it´s don´t", "it's don't"),
        ("co\u00adoperate \ufeffhere", "cooperate here"),
        ("Café naïve", "cafe naive"),
        ("salt & pepper", "salt and pepper"),
        ("well-known--fact", "well known fact"),
        ("", ""),
        ("?!", ""),
    ],
)
def test_english_is_written_as_it_is_spoken(written, spoken):
    assert english(written) == spoken


def test_english_is_idempotent():
    text = english("On the 4th of July, 1776, it's $5 & 20%!")
    assert english(text) == text


def test_neutral_keeps_every_script():
    assert neutral("你好，世界！") == "你好 世界"
    assert neutral("Привет, Мир!") == "привет мир"
    assert neutral("L’ÉTÉ déjà") == "l'été déjà"
    assert neutral("it´s") == "it's"
    assert neutral("5½ m²") == "5 1 2 m"


@pytest.mark.parametrize("word", ["ශ්\u200dරී", "می\u200cخواهم", "क्\u200dष"])
def test_neutral_keeps_joiners_within_words(word):
    assert neutral(f"{word}, {word}") == f"{word} {word}"


def test_neutral_drops_what_is_not_seen():
    assert neutral("Wör\u00adter \u200dund\u200bmehr \u200d \u202bא") == "wörter und mehr א"
    assert neutral("'کتاب'\u200cها") == "کتاب ها"


def test_neutral_leaves_nothing_of_emoji():
    assert neutral("I ❤\ufe0f you 1\ufe0f\u20e3") == "i you 1"


def test_an_unknown_normaliser_names_the_choices():
    with pytest.raises(ValueError, match="english"):
        get_normalizer("german")
