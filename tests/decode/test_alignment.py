import itertools

import pytest
import torch

from asr.decode.alignment import ctc_alignments
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


@pytest.mark.parametrize("seed", range(4))
def test_the_alignments_are_the_likeliest_paths(seed):
    generator = torch.Generator().manual_seed(seed)
    transcripts, lens = [[1], [1, 2], [1, 1], [2, 1, 2], [1, 2, 2], []], [6, 5, 6, 4, 6, 6]
    log_probs = torch.randn(6, 6, 3, generator=generator).mul(2).log_softmax(dim=2)
    found = ctc_alignments(log_probs, torch.tensor(lens), transcripts)
    for row, length, tokens, spans in zip(log_probs, lens, transcripts, found, strict=True):
        aligned = [BLANK] * length
        for token, (first, end) in zip(tokens, spans, strict=True):
            aligned[first:end] = [token] * (end - first)
        assert aligned == list(brute_force(row[:length], tokens))


def test_too_few_frames_have_no_path():
    enough, too_few = ctc_alignments(torch.zeros(2, 3, 3), torch.tensor([3, 2]), [[1, 1], [1, 1]])
    assert enough == [(0, 1), (2, 3)] and too_few is None
    assert ctc_alignments(torch.zeros(3, 2, 3), torch.tensor([0, 0, 1]), [[1], [], [1]]) == [None, [], [(0, 1)]]
