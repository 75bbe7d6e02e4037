import itertools
from dataclasses import replace

import pytest
import torch

from asr.audio.config import FeatureConfig
from asr.decode.alignment import ctc_alignments, frame_times, timed_words
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
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


@pytest.mark.parametrize("kept", [2**27, 160, 1], ids=["at once", "in parts", "frame by frame"])
@pytest.mark.parametrize("seed", range(4))
def test_the_alignments_are_the_likeliest_paths(seed, kept, monkeypatch):
    monkeypatch.setattr("asr.decode.alignment.KEPT", kept)
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


FRONT_ENDS = [
    *((FeatureConfig(), {"subsampling": factor}) for factor in (4, 6, 8)),
    (FeatureConfig(kind="kaldi"), {"subsampling": 4, "subsampler": "conv1d_glu"}),
    (FeatureConfig(kind="whisper"), {"subsampling": 2, "subsampler": "conv1d"}),
    (FeatureConfig(kind="matrix", hop_ms=20.0, window_ms=20.0), {"subsampling": 4}),
    (FeatureConfig(kind="matrix", dim=8), {"subsampling": 1, "subsampler": "linear"}),
]


@pytest.mark.parametrize(("features", "shape"), FRONT_ENDS)
def test_a_frame_lies_in_the_middle_of_what_it_sees(features, shape, tiny_config, tiny_model):
    config = replace(tiny_config, input_dim=features.dim, **shape)
    model = SpeechModel(features, Transformer(config), tiny_model.tokenizer)
    matrix = features.takes == "matrix"
    inputs = torch.randn(1, 100, features.dim) if matrix else torch.randn(1, 16_000)
    X, X_lens = model.front_end.extract(inputs.requires_grad_(), torch.tensor([inputs.shape[1]]))
    frames, _ = model.transformer.encoder.subsampling(X, X_lens)
    frames[0, 5].square().sum().backward()
    seen = inputs.grad[0].reshape(inputs.shape[1], -1).abs().sum(1).nonzero()
    seconds = features.hop_ms / 1000 if matrix else 1 / 16_000
    first, step = frame_times(model)
    middle = (seen.min() + seen.max() + 1).item() / 2 * seconds
    assert first + 5.5 * step == pytest.approx(middle, abs=2e-4)


def test_no_word_begins_before_the_sound(tiny_config, tiny_model):
    config = replace(tiny_config, input_dim=80, subsampling=2, subsampler="conv1d")
    model = SpeechModel(FeatureConfig(kind="whisper"), Transformer(config), tiny_model.tokenizer)
    assert frame_times(model)[0] == pytest.approx(-0.01)
    (word,) = timed_words(model, tiny_model.tokenizer.encode("a"), [(0, 1)])
    assert (word.start, word.end) == (0.0, pytest.approx(0.01))
