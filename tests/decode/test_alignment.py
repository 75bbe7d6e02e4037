import itertools

import pytest
import torch

from asr.decode.alignment import ctc_alignment
from asr.text.tokenizer import BLANK


def brute_force(log_probs, tokens):
    """The likeliest of all paths that CTC collapses to `tokens`."""
    best, best_path = -float("inf"), None
    for path in itertools.product(range(log_probs.shape[1]), repeat=len(log_probs)):
        collapsed = [token for token, _ in itertools.groupby(path) if token != BLANK]
        score = sum(float(log_probs[t, token]) for t, token in enumerate(path))
        if collapsed == tokens and score > best:
            best, best_path = score, path
    return best_path


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 1], [2, 1, 2], [1, 2, 2]])
@pytest.mark.parametrize("seed", range(4))
def test_the_alignment_is_the_likeliest_path(tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    log_probs = torch.randn(6, 3, generator=generator).mul(2).log_softmax(dim=1)
    path = list(brute_force(log_probs, tokens))
    spans = ctc_alignment(log_probs, tokens)
    aligned = [BLANK] * 6
    for token, (first, end) in zip(tokens, spans, strict=True):
        aligned[first:end] = [token] * (end - first)
    assert aligned == path


def test_no_tokens_lie_nowhere():
    assert ctc_alignment(torch.zeros(3, 2), []) == []


def test_too_few_frames_are_refused():
    with pytest.raises(ValueError, match="2 frames are too few for 2 tokens"):
        ctc_alignment(torch.zeros(2, 3), [1, 1])
