"""Phrases against their definition: a bonus for each token of a phrase that is written to its end, and no other."""

import itertools
import random

import pytest
import torch

from asr.decode.options import DecodeOptions
from asr.decode.phrases import Phrases
from asr.decode.recognizer import Recognizer
from asr.decode.search import phrase_gains
from asr.text.tokenizer import EOS, CharTokenizer, SubwordTokenizer

LETTERS = CharTokenizer(list(" abcd"))


def total(phrases: Phrases, ids: list[int]) -> float:
    """The bonus that the tables add to a hypothesis, its end included."""
    place, earned = torch.tensor([[phrases.start]]), 0.0
    for token in [*ids, EOS]:
        earned += float(phrases.gains[place, token])
        place = phrases.advance(place, torch.tensor([[token]]))
    return earned


def test_only_whole_words_of_whole_phrases_earn():
    phrases = Phrases.of([["ab"], ["ab cd"], ["d"]], 2.0, LETTERS)
    nothing = total(phrases, LETTERS.encode("c"))  # what every hypothesis gets
    for text, tokens in (
        ("ab", 3),  # the space before it is a token, too
        ("c ab", 3),
        ("abc", 0),
        ("ab c", 3),  # nothing is left of the longer phrase
        ("ab cd", 6),
        ("ab cda", 3),
        ("cab", 0),
        ("d ab d", 2 + 3 + 2),
        ("ab ab", 6),
        ("ab d", 3 + 2),  # the space that continued the longer phrase starts another
    ):
        assert total(phrases, LETTERS.encode(text)) - nothing == pytest.approx(2.0 * tokens), text


def test_it_is_the_bonus_of_the_phrases_that_stand_in_a_text():
    """Compares with a greedy left-to-right reading of random texts of up to four words."""
    said = ["ab", "ab cd", "cd a", "b"]
    phrases, words = Phrases.of([[phrase] for phrase in said], 1.0, LETTERS), ["a", "ab", "b", "cd", "dd"]
    ways = sorted((phrase.split() for phrase in said), key=len, reverse=True)
    nothing = total(phrases, [])

    def read(text: list[str]) -> int:
        if not text:
            return 0
        way = next((way for way in ways if text[: len(way)] == way), None)
        return sum(map(len, way)) + len(way) + read(text[len(way) :]) if way else read(text[1:])

    texts = [text for n in range(5) for text in itertools.product(words, repeat=n)]
    for text in random.Random(0).sample(texts, 300):
        assert total(phrases, LETTERS.encode(" ".join(text))) - nothing == pytest.approx(read(list(text))), text


@pytest.mark.parametrize("said", [["a ab cd", "ab"], ["ab cd b a", "cd", "cd b dd"], ["ab b cd", "b cd a", "b"]])
def test_no_phrase_takes_from_another_what_it_has_earned(said):
    """Compares with the most tokens that non-overlapping phrases can have in a text of up to five words."""
    phrases, words = Phrases.of([[phrase] for phrase in said], 1.0, LETTERS), ["a", "ab", "b", "cd", "dd"]
    nothing = total(phrases, [])

    def most(text: tuple[str, ...]) -> int:
        begun = [way for phrase in said if text[: len(way := tuple(phrase.split()))] == way]
        ways = [sum(map(len, way)) + len(way) + most(text[len(way) :]) for way in begun]
        return max([*ways, most(text[1:])]) if text else 0

    texts = [text for n in range(6) for text in itertools.product(words, repeat=n)]
    for text in random.Random(0).sample(texts, 300):
        assert total(phrases, LETTERS.encode(" ".join(text))) - nothing == pytest.approx(most(text)), text


def test_a_phrase_within_a_longer_one_that_is_not_said_to_its_end_earns():
    letters = CharTokenizer(list(" abcdefghijklmnopqrstuvwxyz"))
    for said, text, tokens in (
        (["new york city", "york"], "in new york times", 5),
        (["kim jong un", "jong"], "kim jong il", 5),
        (["san francisco bay area", "francisco", "bay"], "san francisco bay bridge", 14),
        (["san francisco bay area", "francisco", "bay"], "san francisco bay area", 23),
        (["ann", "annabel lee"], "ann smith", 4),
        (["ann", "annabel lee"], "annabel smith", 0),  # annabel is not ann
    ):
        phrases = Phrases.of([[phrase] for phrase in said], 1.0, letters)
        assert total(phrases, letters.encode(text)) - total(phrases, []) == tokens, text


def test_no_token_earns_twice():
    """A phrase that overlaps with itself does not reward a loop."""
    phrases = Phrases.of([["ab ab ab"], ["a b"], ["b a"]], 1.0, LETTERS)
    nothing = total(phrases, LETTERS.encode("c"))
    for text in ("ab " * 7, "a b " * 5, "b a b a b"):
        written = text.strip()
        assert total(phrases, LETTERS.encode(written)) - nothing <= len(written) + 1
    assert total(phrases, LETTERS.encode("ab " * 6)) - nothing == 18


def test_punctuation_ends_a_word_and_scripts_without_spaces_have_none():
    marks = CharTokenizer(list(" abc.,'-"))
    phrases = Phrases.of([["ab"]], 1.0, marks)
    assert (
        total(phrases, marks.encode("c ab, c"))
        == total(phrases, marks.encode("c ab"))
        == 3 + total(phrases, marks.encode("c abc"))
    )
    assert total(phrases, marks.encode("ab'c")) == total(phrases, marks.encode("ab-c")) == total(phrases, [])
    unspaced = CharTokenizer(list("\u5317\u4eac\u4e0a\u6d77\u6211"))
    phrases = Phrases.of([["\u5317\u4eac"]], 1.0, unspaced)
    assert total(phrases, unspaced.encode("\u6211\u5317\u4eac\u6211")) == 2
    assert total(phrases, unspaced.encode("\u6211\u5317\u6211")) == 0
    phonemes = CharTokenizer(list("abc"))
    assert total(Phrases.of([["ab"]], 1.0, phonemes), phonemes.encode("cabc")) == 2


@pytest.mark.parametrize("sign", ["\u093e", "\u0301", "\u200c", "\u200d"])
def test_a_vowel_sign_an_accent_or_a_joiner_goes_on_with_the_word(sign):
    letters = CharTokenizer(list(f" \u0930\u092e{sign}"))
    phrases = Phrases.of([["\u0930\u092e"]], 1.0, letters)
    nothing = total(phrases, [])
    assert total(phrases, letters.encode("\u0930\u092e")) - nothing == 3
    assert total(phrases, letters.encode(f"\u0930\u092e{sign}")) == nothing


def test_of_the_ways_to_write_a_phrase_each_earns(caplog):
    cased = CharTokenizer(list(" abAB"))
    phrases = Phrases.of([["ab", "Ab"]], 1.0, cased)
    nothing = total(phrases, [])
    assert total(phrases, cased.encode("Ab")) - nothing == total(phrases, cased.encode("ab")) - nothing == 3
    Phrases.of([["ab", "Ab"]], 1.0, LETTERS)
    assert not caplog.text


@pytest.mark.parametrize("strategy", ["beam", "rescore"])
def test_what_it_adds_is_in_the_score_once_and_not_in_how_sure_a_token_is(tiny_model, strategy, noise_is_heard):
    sound = torch.randn(16000, generator=torch.Generator().manual_seed(1)).mul(0.1).numpy()
    base = DecodeOptions(strategy=strategy, beam_size=4, nbest=4, phrases=("a",), phrase_weight=1e-9)
    recognizer = Recognizer(tiny_model, base, precision="float32")
    (plain,) = recognizer.recognize([sound])
    recognizer = recognizer.with_options(phrase_weight=1e-3)  # too little to change what is found
    (told,) = recognizer.recognize([sound])
    gains = phrase_gains(recognizer.phrases, [told], EOS)[0]
    assert [h.tokens for h in plain] == [h.tokens for h in told]
    for before, after, gained in zip(plain, told, gains, strict=True):
        assert after.score - before.score == pytest.approx(sum(gained), abs=1e-5)
        assert after.token_scores == pytest.approx(before.token_scores, abs=1e-5)


def test_subwords_begin_with_their_space():
    tokenizer = SubwordTokenizer.train(["john smith went to town", "mary johnson went"] * 5, 40)
    phrases = Phrases.of([["john smith"]], 1.0, tokenizer)
    assert phrases.start == 0 and total(phrases, tokenizer.encode("mary went")) == 0
    assert total(phrases, tokenizer.encode("to john smith")) == len(tokenizer.encode("john smith"))
    assert total(phrases, tokenizer.encode("to john")) == total(phrases, tokenizer.encode("johnson")) == 0
    assert Phrases.of([["ohn"]], 1.0, tokenizer).start == 0  # though its first token is the space alone


@pytest.mark.parametrize("kind", ["characters", "subwords"])
def test_a_phrase_of_a_script_without_spaces_stands_anywhere(kind):
    """Even if the vocabulary has a space."""
    texts = ["\u6211\u5728 \u5317\u4eac", "\u6211\u5728\u4e0a\u6d77 ok", "\u5317"]
    tokenizer = CharTokenizer.train(texts) if kind == "characters" else SubwordTokenizer.train(texts, 16)
    phrases = Phrases.of([["\u5317\u4eac"]], 1.0, tokenizer)
    nothing = total(phrases, [])
    for text in ("\u6211\u5728\u5317\u4eac", "\u5317\u4eac\u6211", "\u6211\u5317\u4eacok", "\u6211\u5317\u4eac ok"):
        assert total(phrases, tokenizer.encode(text)) - nothing >= 2, text
    for text in ("\u6211\u5728\u5317", "\u4eac\u5317\u6211", "ok"):
        assert total(phrases, tokenizer.encode(text)) == nothing, text
    ok = Phrases.of([["ok"]], 1.0, tokenizer)
    assert total(ok, tokenizer.encode("\u6211 ok\u5317")) > total(ok, [])  # a word ends before such a letter
    longer = Phrases.of([["\u5317"], ["\u5317ok"]], 1.0, tokenizer)
    assert total(longer, tokenizer.encode("\u5317o")) > total(longer, [])  # the first is complete before the letter


def test_more_phrases_than_a_table_can_be_made_of_are_refused(monkeypatch):
    monkeypatch.setattr("asr.decode.phrases.LARGEST", 4 * len(LETTERS))  # four places: the start, and " ab"
    Phrases.of([["ab"]], 1.0, LETTERS)
    with pytest.raises(ValueError, match="phrases: 2 are too many for a vocabulary of 9 tokens"):
        Phrases.of([["ab"], ["c"]], 1.0, LETTERS)


def test_what_cannot_be_written_is_said(caplog):
    assert Phrases.of([["xyz"]], 1.0, LETTERS) is None
    assert "1 phrases have characters that the model cannot write, as 'xyz'" in caplog.text


@pytest.mark.parametrize(
    "options", [{}, {"ctc_weight": 0.0}, {"strategy": "ctc"}, {"strategy": "rescore"}, {"strategy": "greedy"}]
)
def test_a_recogniser_writes_what_it_is_told_to_expect(tiny_model, options, noise_is_heard):
    """The model has random weights: only a high bonus changes what it hears."""
    sound = torch.randn(16000, generator=torch.Generator().manual_seed(1)).mul(0.1).numpy()
    base = DecodeOptions(**{"beam_size": 4} | options)
    plain = Recognizer(tiny_model, base, precision="float32").transcribe(sound).text
    told = DecodeOptions(**{"beam_size": 4} | options, phrases=("cab dab",), phrase_weight=30.0)
    recognizer = Recognizer(tiny_model, told, precision="float32")
    heard = recognizer.transcribe(sound).text
    assert "cab dab" in heard and "cab dab" not in plain
    assert recognizer.with_options(phrases=()).transcribe(sound).text == plain
