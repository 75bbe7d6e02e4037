import pytest
import torch

from asr.audio.augment import SpecAugment, change_speed, change_vocal_tract
from asr.audio.config import FeatureConfig, SpecAugmentConfig
from asr.audio.features import FrontEnd


def test_spec_augment_changes_its_input():
    X, X_lens = torch.ones(4, 300, 80), torch.tensor([300, 300, 200, 100])
    masked = SpecAugment(SpecAugmentConfig())(X, X_lens) == 0
    assert 0.05 < masked.float().mean() < 0.6


def test_masks_have_at_most_their_width_and_differ_between_utterances():
    config = SpecAugmentConfig(freq_masks=1, freq_width=10, time_masks=1, time_ratio=0.1)
    X, X_lens = torch.ones(200, 100, 80), torch.full((200,), 100)
    masked = SpecAugment(config)(X, X_lens) == 0
    bands, frames = masked.all(dim=1).sum(dim=1), masked.all(dim=2).sum(dim=1)
    assert bands.max() == 10 and bands.min() == 0
    assert frames.max() == 10 and frames.min() == 0
    assert len({tuple(row.nonzero().flatten().tolist()) for row in masked.all(dim=1)}) > 50


def test_time_masks_lie_inside_each_utterance():
    for ratio in (0.5, 1.0):
        config = SpecAugmentConfig(freq_masks=0, time_masks=3, time_ratio=ratio)
        masked = SpecAugment(config)(torch.ones(50, 100, 8), torch.full((50,), 20)) == 0
        assert masked[:, :20].any(dim=0).all()  # from its first frame to its last
        assert not masked[:, 20:].any()


@pytest.mark.parametrize(("factor", "hertz"), [(0.9, 900), (1.0, 1000), (1.1, 1100)])
def test_speed_changes_length_and_pitch(factor, hertz):
    tone = torch.sin(2 * torch.pi * 1000 * torch.arange(16_000) / 16_000)
    played, lens = change_speed(tone[None], torch.tensor([16_000]), factor)
    assert played.shape[1] == lens.item() == pytest.approx(16_000 / factor, abs=2)
    loudest = torch.fft.rfft(played[0]).abs().argmax() * 16_000 / played.shape[1]
    assert loudest.item() == pytest.approx(hertz, rel=0.01)


@pytest.mark.parametrize("factor", [0.85, 0.9, 1.1])
def test_an_utterance_is_played_alike_alone_and_in_a_batch(factor):
    short, long = torch.randn(4001), torch.randn(9000)
    alone, alone_lens = change_speed(short[None], torch.tensor([4001]), factor)
    batch = torch.nn.utils.rnn.pad_sequence([long, short], batch_first=True)
    played, lens = change_speed(batch, torch.tensor([9000, 4001]), factor)
    assert lens[1] == alone_lens[0] == alone.shape[1]
    torch.testing.assert_close(played[1, : lens[1]], alone[0])
    assert not played[1, lens[1] :].any()


HERTZ = FrontEnd(FeatureConfig()).hertz


def test_a_longer_vocal_tract_resonates_lower():
    tone = torch.sin(2 * torch.pi * 1500 * torch.arange(16_000) / 16_000)
    X, _ = FrontEnd(FeatureConfig()).extract(tone.expand(3, -1), torch.full((3,), 16_000))
    changed = change_vocal_tract(X, HERTZ, torch.tensor([0.9, 1.0, 1.1]))
    torch.testing.assert_close(changed[1], X[1])
    loudest = HERTZ[changed[:, 50].argmax(dim=1)]
    torch.testing.assert_close(loudest, 1500 / torch.tensor([0.9, 1.0, 1.1]), rtol=0.02, atol=0)


def test_frequencies_are_scaled_to_4800_hertz_and_bent_from_there_to_half_the_sample_rate():
    """Jaitly and Hinton (2013), equation 1, applied to features that are each band's own frequency."""
    X = HERTZ.expand(2, 1, -1)
    short, long = change_vocal_tract(X, HERTZ, torch.tensor([0.8, 1.25]))[:, 0]
    inside = (HERTZ < 4800 / 1.25) & (HERTZ > 60)  # lower bands would come from below the lowest one
    torch.testing.assert_close(short[inside], 0.8 * HERTZ[inside])
    torch.testing.assert_close(long[inside], 1.25 * HERTZ[inside])
    f = HERTZ[-5]
    torch.testing.assert_close(short[-5], 8000 - (8000 - 3840) / (8000 - 4800) * (8000 - f))
    torch.testing.assert_close(long[-5], 8000 - (8000 - 4800) / (8000 - 3840) * (8000 - f))


def test_each_utterance_has_a_vocal_tract_and_padding_stays_zero():
    X = torch.randn(8, 1, 80).repeat(1, 20, 1)
    X[:, 15:] = 0.0
    config = SpecAugmentConfig(freq_masks=0, time_masks=0, vocal_tract=0.1)
    changed = SpecAugment(config, HERTZ)(X, torch.full((8,), 15))
    assert not changed[:, 15:].any()
    torch.testing.assert_close(changed[:, 0], changed[:, 14])
    assert all((changed[i, 0] - X[i, 0]).abs().max() > 0.1 for i in range(8))


def test_vocal_tracts_are_as_much_longer_as_shorter(monkeypatch):
    drawn = []
    monkeypatch.setattr("asr.audio.augment.change_vocal_tract", lambda X, hertz, lengths: drawn.append(lengths) or X)
    SpecAugment(SpecAugmentConfig(vocal_tract=0.2), HERTZ)(torch.zeros(500, 1, 80), torch.ones(500))
    shortest, longest = drawn[0].aminmax()
    assert 0.8 <= shortest < 0.82 and 1.18 < longest <= 1.2


@pytest.mark.parametrize("wrong", [{"freq_masks": -1}, {"freq_width": -1}, {"time_masks": -1}, {"time_ratio": 1.1}])
def test_masks_that_cannot_be_are_refused(wrong):
    with pytest.raises(ValueError, match="spec_augment: counts and widths must not be negative, time_ratio"):
        SpecAugmentConfig(**wrong)


def test_what_has_no_frequencies_has_no_vocal_tract():
    matrices = FrontEnd(FeatureConfig(kind="matrix"))
    with pytest.raises(ValueError, match="spec_augment.vocal_tract .* features.kind=log_mel"):
        SpecAugment(SpecAugmentConfig(vocal_tract=0.1), matrices.hertz)
    with pytest.raises(ValueError, match="vocal_tract: 0.7 does not lie"):
        SpecAugmentConfig(vocal_tract=0.7)
