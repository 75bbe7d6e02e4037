import pytest
import torch

from asr.audio.augment import SpecAugment, SpecAugmentConfig, change_speed


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
    config = SpecAugmentConfig(freq_masks=0, time_masks=3, time_ratio=1.0)
    masked = SpecAugment(config)(torch.ones(50, 100, 8), torch.full((50,), 20)) == 0
    assert masked[:, :20].any()
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
