import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from asr.audio.config import FeatureConfig
from asr.audio.features import QUIET, SILENCE, FrontEnd, RunningStatistics, quiet_gain


def test_ten_seconds_are_a_thousand_frames_less_the_window():
    X, X_lens = FrontEnd(FeatureConfig())(torch.randn(1, 160_000), torch.tensor([160_000]))
    assert X.shape == (1, 998, 80)
    assert X_lens.tolist() == [998]


def test_padding_never_changes_a_feature_of_a_real_frame():
    front_end = FrontEnd(FeatureConfig(normalization="utterance"))
    short, long = torch.randn(8_000), torch.randn(20_000)
    alone, alone_lens = front_end(short[None], torch.tensor([8_000]))
    padded = torch.nn.functional.pad(short, (0, 12_000))
    batch, batch_lens = front_end(torch.stack([padded, long]), torch.tensor([8_000, 20_000]))
    assert batch_lens[0] == alone_lens[0]
    torch.testing.assert_close(batch[0, : batch_lens[0]], alone[0], atol=1e-5, rtol=0)
    assert (batch[0, batch_lens[0] :] == 0).all()


def test_a_tone_lights_the_band_of_its_frequency():
    t = torch.arange(16_000) / 16_000
    low, high = (torch.sin(2 * torch.pi * hertz * t) for hertz in (300, 3000))
    X, _ = FrontEnd(FeatureConfig())(torch.stack([low, high]), torch.tensor([16_000, 16_000]))
    low_band, high_band = X.mean(dim=1).argmax(dim=1).tolist()
    mel = [2595 * torch.log10(torch.tensor(1 + hertz / 700)).item() for hertz in (20, 300, 3000, 8000)]
    for band, place in ((low_band, mel[1]), (high_band, mel[2])):
        assert band == pytest.approx(81 * (place - mel[0]) / (mel[3] - mel[0]) - 1, abs=1)


def test_a_thread_that_extracts_leaves_autocast_in_another_as_it_was(monkeypatch):
    front_end, sounds, lens = FrontEnd(FeatureConfig()), torch.randn(1, 4000), torch.tensor([4000])
    inside, leave, mel_power = threading.Event(), threading.Event(), front_end._mel_power

    def in_the_middle(inputs: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert leave.wait(30)
        return mel_power(inputs)

    def train() -> bool:
        with torch.autocast("cpu", torch.bfloat16):
            front_end.extract(sounds, lens)
            return torch.is_autocast_enabled("cpu")

    monkeypatch.setattr(front_end, "_mel_power", in_the_middle)
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train)
        assert inside.wait(30)
        front_end.extract(sounds, lens)
        leave.set()
        assert training.result()


def test_statistics_give_zero_mean_and_unit_deviation():
    config = FeatureConfig()
    front_end, statistics = FrontEnd(config), RunningStatistics(config)
    sound, lens = torch.randn(3, 16_000), torch.tensor([16_000, 12_000, 9_000])
    statistics.update(*front_end.extract(sound, lens))
    front_end.set_statistics(*statistics.result())
    X, X_lens = front_end(sound, lens)
    frames = torch.cat([x[:n] for x, n in zip(X, X_lens, strict=True)])
    torch.testing.assert_close(frames.mean(dim=0), torch.zeros(80), atol=1e-4, rtol=0)
    torch.testing.assert_close(frames.std(dim=0), torch.ones(80), atol=0.01, rtol=0)


def test_with_utterance_normalisation_the_deviation_is_around_each_ones_own_mean():
    loud, quiet = 5 + torch.randn(1, 400, 80), -5 + 2 * torch.randn(1, 400, 80)
    statistics = RunningStatistics(FeatureConfig(normalization="utterance"))
    for X in (loud, quiet):
        statistics.update(X, torch.tensor([400]))
    mean, std = statistics.result()
    assert mean.abs().max() < 1e-5
    expected = torch.stack([X[0].std(dim=0, correction=0).square() for X in (loud, quiet)]).mean(dim=0).sqrt()
    torch.testing.assert_close(std, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("normalization", ["global", "utterance", "cmvn"])
def test_a_feature_that_never_changes_becomes_zero(normalization):
    config = FeatureConfig(kind="matrix", dim=2, normalization=normalization)
    front_end, statistics = FrontEnd(config), RunningStatistics(config)
    X, X_lens = torch.randn(2, 50, 2), torch.tensor([50, 50])
    X[:, :, 1] = 7.0
    statistics.update(X, X_lens)
    front_end.set_statistics(*statistics.result())
    normalized = front_end(X, X_lens)[0]
    assert normalized[:, :, 1].abs().max() < 1e-3 and normalized[:, :, 0].std() == pytest.approx(1, abs=0.1)


def test_utterance_normalisation_does_not_hear_the_level():
    front_end = FrontEnd(FeatureConfig(normalization="utterance"))
    sound, lens = torch.randn(1, 16_000), torch.tensor([16_000])
    torch.testing.assert_close(front_end(sound, lens)[0], front_end(0.1 * sound, lens)[0], atol=1e-3, rtol=0)


@pytest.mark.parametrize("normalization", ["utterance", "cmvn"])
def test_nothing_of_a_quiet_sound_is_lost_under_the_floor(normalization):
    front_end = FrontEnd(FeatureConfig(normalization=normalization))
    sound = torch.randn(1, 16_000) * torch.logspace(0, -2, 16_000)  # 40 dB softer at its end
    sound *= QUIET / sound.abs().max()
    both = torch.cat([sound, sound * 3 * SILENCE / QUIET])
    X, _ = front_end(both, torch.tensor([16_000, 16_000]))
    torch.testing.assert_close(X[0], X[1], atol=1e-3, rtol=0)


def test_a_quiet_sound_is_raised_to_one_amplitude_a_loud_one_is_left():
    square = torch.ones(1, 16_000)
    square[:, ::2] = -1
    levels = torch.tensor([[1.0], [QUIET], [QUIET / 3], [SILENCE / 10]])
    gains = quiet_gain(levels * square)
    torch.testing.assert_close(gains, torch.tensor([[1.0], [1.0], [3.0], [QUIET / SILENCE]]))


def test_where_an_offset_ends_in_the_padding_no_frame_changes():
    front_end = FrontEnd(FeatureConfig(normalization="utterance"))
    sound = torch.full((1, 16_100), 0.012)
    sound[:, 4000:12_000] += 0.0012 * torch.randn(8000)
    sound[0, 4000:11_500:1500] += 0.5  # five clicks; with the offset's end there would be six
    X, X_lens = front_end(sound, lens := torch.tensor([16_100]))
    in_batch, _ = front_end(torch.nn.functional.pad(sound, (0, 5000)), lens)
    torch.testing.assert_close(in_batch[:, : X_lens[0]], X)


def test_neither_clicks_nor_an_offset_make_a_quiet_sound_loud():
    sound = QUIET / 10 * torch.rand(1, 16_000)
    clicks = sound.clone()
    clicks[:, 1_000:13_000:3_000] = 0.9
    torch.testing.assert_close(quiet_gain(clicks), quiet_gain(sound), rtol=0.01, atol=0)
    torch.testing.assert_close(quiet_gain(sound + 0.2), quiet_gain(sound), rtol=1e-3, atol=0)


def test_the_gain_of_a_quiet_sound_does_not_hang_on_its_padding():
    for samples in (40, 500, 5_000):
        sound = 0.004 * torch.randn(1, samples)
        alone, padded = quiet_gain(sound), quiet_gain(torch.nn.functional.pad(sound, (0, 20_000)))
        torch.testing.assert_close(alone, padded, rtol=0.2, atol=0)


def test_with_global_normalisation_a_quiet_sound_is_quiet():
    sound = QUIET * torch.rand(1, 16_000)
    X, _ = FrontEnd(FeatureConfig())(torch.cat([sound, 0.1 * sound]), torch.tensor([16_000, 16_000]))
    assert (X[0] > X[1]).all()


def test_a_sound_shorter_than_a_window_has_no_frame():
    X, X_lens = FrontEnd(FeatureConfig())(torch.randn(2, 160), torch.tensor([160, 0]))
    assert X_lens.tolist() == [0, 0]
    assert (X == 0).all()


def test_kaldi_s_windows_of_parts_of_samples_are_truncated():
    front_end = FrontEnd(FeatureConfig(kind="kaldi", dim=20, window_ms=12.3, hop_ms=5.1))
    X, X_lens = front_end(0.1 * torch.randn(2, 16_000), torch.tensor([16_000, 8_000]))
    assert X_lens[0] == X.shape[1] and (front_end.window, front_end.hop) == (196, 81)


def test_matrices_pass_as_they_are():
    front_end = FrontEnd(FeatureConfig(kind="matrix", dim=5))
    matrix = torch.randn(2, 7, 5)
    X, X_lens = front_end(matrix, torch.tensor([7, 4]))
    torch.testing.assert_close(X[0], matrix[0])
    assert X_lens.tolist() == [7, 4]


def test_a_matrix_of_the_wrong_width_is_refused():
    with pytest.raises(ValueError, match="5"):
        FrontEnd(FeatureConfig(kind="matrix", dim=5))(torch.randn(2, 7, 6), torch.tensor([7, 7]))


@pytest.mark.parametrize(
    "wrong", [{"kind": "mfcc"}, {"normalization": "batch"}, {"dim": 0}, {"window_ms": 5.0}, {"hop_ms": 0.01}]
)
def test_wrong_options_are_named(wrong):
    with pytest.raises(ValueError, match="features"):
        FeatureConfig(**wrong)
