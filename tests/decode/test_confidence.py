import numpy as np
import pytest
import torch

from asr.decode.confidence import Calibration, expected_calibration_error, word_confidences
from asr.decode.options import DecodeOptions
from asr.decode.recognizer import Recognizer


def test_without_calibration_it_is_the_geometric_mean_of_the_tokens():
    scores = [[np.log(0.9), np.log(0.4)], [np.log(0.5)]]
    assert word_confidences(scores) == pytest.approx([0.6, 0.5])
    assert len(word_confidences([])) == 0


def test_calibrated_it_is_the_logistic_function_of_the_mean_and_the_least():
    confidence = 1 / (1 + np.exp(-(4.0 + 0.5 * -2.0 + 0.75 * -3.0)))
    assert word_confidences([[-1.0, -3.0]], Calibration(4.0, mean=0.5, least=0.75)) == pytest.approx([confidence])


def test_the_calibration_error_is_the_distance_from_the_rate_of_right_words():
    assert expected_calibration_error([0.95] * 100, [True] * 60 + [False] * 40) == pytest.approx(0.35)
    assert expected_calibration_error([0.75] * 4 + [0.25] * 4, [1, 1, 1, 0, 1, 0, 0, 0]) == pytest.approx(0.0)
    assert expected_calibration_error([1.0, 0.85], [False, True]) == pytest.approx((1.0 + 0.15) / 2)  # bin by bin


def test_calibrating_makes_confidences_tell_the_rate():
    rng = np.random.default_rng(0)
    means = -rng.exponential(0.5, 4000)
    scores = [[m, 2 * m] for m in means]
    right = rng.random(4000) < 1 / (1 + np.exp(-(2.0 + 3.0 * means)))  # overconfident before calibration
    calibration = Calibration.fit(scores[:2000], right[:2000].tolist())
    errors = [expected_calibration_error(word_confidences(scores[2000:], c), right[2000:]) for c in (None, calibration)]
    assert errors[1] < 0.03 < errors[0]


def test_few_words_whose_scores_lie_far_apart_are_fitted_too():
    scores = [[-4.0], [-2.0, -6.0], [-6.0, -1.0], [0.0, -50.0], [-29.0, -36.0]]
    right = [False, False, True, True, False]
    calibration = Calibration.fit(scores, right)
    assert np.abs([calibration.bias, calibration.mean, calibration.least]).max() < 100
    assert expected_calibration_error(word_confidences(scores, calibration), right) < 0.2


def test_words_all_right_are_no_error():
    calibration = Calibration.fit([[-0.1], [-0.2]], [True, True])
    assert (word_confidences([[-0.1]], calibration) > 0.5).all()
    with pytest.raises(ValueError, match="no word"):
        Calibration.fit([], [])


@pytest.mark.parametrize("strategy", ["beam", "ctc", "rescore"])
def test_a_length_bonus_is_in_the_score_and_not_in_how_sure_a_token_is(tiny_model, strategy, noise_is_heard):
    """So small a bonus changes nothing about what is found."""
    sound = torch.randn(16000, generator=torch.Generator().manual_seed(1)).mul(0.1).numpy()
    recognizer = Recognizer(tiny_model, DecodeOptions(strategy, beam_size=4, nbest=4), precision="float32")
    (plain,) = recognizer.recognize([sound])
    (longer,) = recognizer.with_options(length_bonus=1e-3).recognize([sound])
    assert [h.tokens for h in plain] == [h.tokens for h in longer] and max(len(h.tokens) for h in plain) > 1
    for before, after in zip(plain, longer, strict=True):
        assert after.score - before.score == pytest.approx(1e-3 * len(before.tokens), abs=1e-5)
        assert after.token_scores == pytest.approx(before.token_scores, abs=1e-5)
