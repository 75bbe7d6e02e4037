from asr.decode.scoring import character_errors, word_errors


def test_edits_are_counted_over_all_pairs():
    errors = word_errors(["a b c d", "x y"], ["a x c", "x y z"])
    assert (errors.substitutions, errors.deletions, errors.insertions, errors.total) == (1, 1, 1, 6)
    assert errors.rate == 50.0


def test_characters_count_spaces():
    assert character_errors(["ab cd"], ["abcd"]).rate == 20.0


def test_an_empty_hypothesis_is_all_deletions():
    assert word_errors(["a b"], [""]).deletions == 2


def test_pairs_without_a_reference_do_not_count():
    assert word_errors(["", "a"], ["b", "a"]).rate == 0.0
    assert word_errors([], []).rate == 0.0
