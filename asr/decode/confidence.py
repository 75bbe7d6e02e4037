"""Word confidences, from what the tokens of a word added to the hypothesis' score, calibrated on a dev set.

Platt scaling (Platt 1999) of the mean and the minimum of the tokens' log-probabilities; the expected calibration error
(Naeini et al. 2015) measures how far the confidences are from the rate of correct words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ITERATIONS = 50  # of Newton's method; it needs about eight
BINS = 10
RIDGE = 1e-3  # keeps the weights finite if correct and wrong words can be separated without error


@dataclass(frozen=True)
class Calibration:
    """The weights of a logistic function of the mean and the minimum of a word's token scores."""

    bias: float
    mean: float
    least: float

    @classmethod
    def fit(cls, token_scores: Sequence[Sequence[float]], right: Sequence[bool]) -> Calibration:
        """Fits the weights to words' token scores and to whether each was correct. Raises ValueError without words."""
        if not right:
            raise ValueError("no word to calibrate the confidences on")
        X, y = _features(token_scores), np.array(right, float)
        weights = np.zeros(X.shape[1])
        for _ in range(ITERATIONS):
            p = _logistic(X @ weights)
            gradient = X.T @ (p - y) + RIDGE * weights
            hessian = (X * (p * (1 - p))[:, None]).T @ X + RIDGE * np.eye(len(weights))
            step = np.linalg.solve(hessian, gradient)
            while _loss(X, y, weights - step) > _loss(X, y, weights):  # the step went too far
                step /= 2
            weights -= step
        return cls(*weights.tolist())


def word_confidences(token_scores: Sequence[Sequence[float]], calibration: Calibration | None = None) -> np.ndarray:
    """Confidence in [0, 1] of each word; without calibration, the geometric mean of its tokens' probabilities."""
    if not token_scores:
        return np.zeros(0)
    X = _features(token_scores)
    if calibration is None:
        return np.exp(np.minimum(X[:, 1], 0.0))
    return _logistic(X @ np.array([calibration.bias, calibration.mean, calibration.least]))


def expected_calibration_error(confidences: Sequence[float], right: Sequence[bool]) -> float:
    """Mean distance between confidence and rate of correct words over `BINS` bins of equal width, weighted by words."""
    confidence, truth = np.asarray(confidences, float), np.asarray(right, float)
    place = np.minimum((confidence * BINS).astype(int), BINS - 1)
    gaps = [abs((confidence[place == b] - truth[place == b]).sum()) for b in range(BINS)]
    return float(sum(gaps) / max(1, len(truth)))


def _logistic(x: np.ndarray) -> np.ndarray:
    return np.exp(-np.logaddexp(0, -x))  # this form does not overflow


def _loss(X: np.ndarray, y: np.ndarray, weights: np.ndarray) -> float:
    """The loss that `Calibration.fit` minimises: -log P(y) plus the ridge penalty."""
    logits = X @ weights
    return float(np.logaddexp(0, np.where(y > 0, -logits, logits)).sum() + RIDGE / 2 * weights @ weights)


def _features(token_scores: Sequence[Sequence[float]]) -> np.ndarray:
    """The features `(words, 3)` of words: 1, mean, minimum."""
    return np.array([(1.0, sum(scores) / len(scores), min(scores)) for scores in token_scores])
