import numpy as np
import pytest

from asr.decode.scoring import character_errors, right_words, sentence_error_rate, wer_interval, word_errors


def test_edits_are_counted_over_all_pairs():
    errors = word_errors(["a b c d", "x y"], ["a x c", "x y z"])
    assert (errors.substitutions, errors.deletions, errors.insertions, errors.total) == (1, 1, 1, 6)
    assert errors.rate == 50.0


def test_one_text_is_no_list_of_texts():
    with pytest.raises(TypeError, match="lists of texts"):
        word_errors("a b", "a c")


def test_characters_count_spaces():
    assert character_errors(["ab cd"], ["abcd"]).rate == 20.0


def test_an_empty_hypothesis_is_all_deletions():
    assert word_errors(["a b"], [""]).deletions == 2


def test_what_is_heard_where_nothing_was_said_is_inserted():
    errors = word_errors(["", "a", ""], ["b c", "a", ""])
    assert (errors.insertions, errors.total, errors.rate) == (2, 1, 200.0)
    assert sentence_error_rate(["", "a", ""], ["b c", "a", ""]) == pytest.approx(100 / 3)
    assert wer_interval([""], ["b"]) == (100.0, 100.0)
    assert word_errors([], []).rate == sentence_error_rate([], []) == 0.0


def test_the_confidence_interval_is_that_of_a_proportion():
    """Independent words with 20 % errors: p +- 1.96 root(p (1 - p) / n)."""
    wrong = np.random.default_rng(1).random((400, 5)) < 0.2
    heard = [" ".join("x" if word else "a" for word in utterance) for utterance in wrong]
    low, high = wer_interval(["a a a a a"] * 400, heard)
    p = wrong.mean()
    half = 196 * np.sqrt(p * (1 - p) / wrong.size)
    assert (low, high) == pytest.approx((100 * p - half, 100 * p + half), abs=0.3)


def test_errors_that_come_together_widen_the_interval():
    alone = wer_interval(["a a a a"] * 100, ["a a a x"] * 100)
    together = wer_interval(["a a a a"] * 100, ["x x x x"] * 25 + ["a a a a"] * 75)
    assert alone == (25.0, 25.0)
    assert together[0] < 20 < 30 < together[1]


def test_without_words_the_interval_is_zero():
    assert wer_interval(["", ""], ["", ""]) == wer_interval([], []) == (0.0, 0.0)


def test_a_word_is_right_where_it_is_aligned_with_its_like():
    assert right_words("the cat sat down", "oh the cat down") == [False, True, True, True]
    assert right_words("red fox", "red box red") == [True, False, False]
    assert right_words("", "oh") == [False] and right_words("oh", "") == []
