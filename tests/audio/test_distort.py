import pytest
import torch

from asr.audio.config import DistortionConfig
from asr.audio.distort import EFFECTS, Distortion, add_voice, level, mix, mu_law, narrow
from asr.audio.reading import SAMPLE_RATE

ALL = {"room": 1.0, "noise": 1.0, "voices": 1.0, "band": 1.0, "clip": 1.0}


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Four utterances of noise, the second half as long."""
    lens = torch.tensor([16000, 8000, 16000, 12000])
    samples = 0.1 * torch.randn(4, 16000)
    return samples.masked_fill(torch.arange(16000) >= lens[:, None], 0.0), lens


@pytest.mark.parametrize("effect", ALL)
def test_every_effect_changes_the_sound_and_leaves_padding_and_level(batch, effect):
    samples, lens = batch
    distorted = Distortion(DistortionConfig(**{effect: 1.0}))(samples, lens)
    assert distorted.shape == samples.shape and distorted.isfinite().all()
    for b, n in enumerate(lens):
        assert not torch.allclose(distorted[b, :n], samples[b, :n], atol=1e-3)
        assert not distorted[b, n:].any()
    quieter = {"band": 0.3, "clip": 0.5}.get(effect, 0.95)  # these two remove part of the signal
    ratio = level(distorted, lens) / level(samples, lens)
    assert (ratio > quieter).all() and (ratio < 1.25).all()


def test_each_utterance_is_drawn_by_itself(batch):
    samples, lens = batch
    samples, lens = samples.repeat(100, 1), lens.repeat(100)
    changed = (Distortion(DistortionConfig(clip=0.3))(samples, lens) != samples).any(dim=1)
    assert changed.float().mean() == pytest.approx(0.3, abs=0.1)


def test_without_a_probability_nothing_is_touched_and_silence_stays(batch):
    samples, lens = batch
    assert Distortion(DistortionConfig())(samples, lens) is samples
    silence = Distortion(DistortionConfig(**ALL))(torch.zeros(2, 8000), torch.tensor([8000, 0]))
    assert silence.isfinite().all() and level(silence, torch.tensor([8000, 8000])).max() < 1e-4


def test_the_same_seed_draws_the_same(batch):
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(Distortion(DistortionConfig(**ALL))(*batch))
    assert torch.equal(*drawn)


def test_a_mixture_has_the_ratio_that_was_asked_for(batch):
    samples, lens = batch
    other = torch.randn(4, 16000)
    added = mix(samples, lens, other, lens, torch.tensor([[0.0], [6.0], [12.0], [20.0]])) - samples
    below = 20 * torch.log10(level(samples, lens) / level(added, lens))[:, 0]
    torch.testing.assert_close(below, torch.tensor([0.0, 6.0, 12.0, 20.0]), atol=0.01, rtol=0)


def test_a_voice_is_below_the_speech_however_short_it_is(batch):
    samples, lens = batch
    other = samples.clone()
    other[:, 400:] = 0.0
    added = add_voice(samples, lens, other, torch.full_like(lens, 400)) - samples
    below = 20 * torch.log10(level(samples, lens) / level(added, torch.full_like(lens, 400)))
    assert (below > 4.99).all() and (below < 20.01).all()


def test_an_echo_follows_its_sound():
    click = torch.zeros(1, SAMPLE_RATE)
    click[0, 4000] = 1.0
    heard = EFFECTS["room"](click, torch.tensor([SAMPLE_RATE]))[0].square()
    assert heard[:3990].sum() < 1e-6 * heard.sum()
    assert heard[4001 : 4000 + 9600].sum() > 0.05 * heard.sum()
    early, late = heard[4040:5600].sum(), heard[4000 + 9600 :].sum()
    assert late < 0.1 * early  # nothing is left after 0.6 s


def test_an_echo_is_up_to_12_decibels_below_its_sound_and_falls_by_60_within_a_tenth_to_six_tenths_of_a_second():
    clicks = torch.zeros(100, SAMPLE_RATE // 4)
    clicks[:, 0] = 1.0
    heard = EFFECTS["room"](clicks, torch.full((100,), clicks.shape[1]))
    assert (heard[:, 80:] > 0).float().mean() == pytest.approx(0.5, abs=0.01)  # as in noise
    power = heard.square()
    below = 10 * torch.log10(power[:, 0] / power[:, 1:].sum(dim=1))
    assert -0.5 < below.min() < 1 and 11 < below.max() < 12.5
    early, late = (power[:, first : first + 800].sum(dim=1) for first in (80, 880))  # 0.05 s later
    seconds = 60 * 0.05 / (10 * torch.log10(early / late))
    assert 0.08 < seconds.min() < 0.15 and 0.5 < seconds.max() < 0.75


def test_noise_is_between_white_and_brown_5_to_25_decibels_below_the_speech():
    samples, lens = torch.randn(100, SAMPLE_RATE), torch.full((100,), SAMPLE_RATE)
    noise = EFFECTS["noise"](samples, lens) - samples
    below = 20 * torch.log10(level(samples, lens) / level(noise, lens))
    assert 4.9 < below.min() < 6 and 24 < below.max() < 25.1
    power = torch.fft.rfft(noise).abs().square()  # one bin per hertz
    exponents = torch.log2(power[:, 200:400].mean(dim=1) / power[:, 3200:6400].mean(dim=1)) / 4  # four octaves apart
    assert -0.1 < exponents.min() < 0.2 and 1.8 < exponents.max() < 2.1


def test_a_narrow_band_has_nothing_above_six_kilohertz():
    x = torch.randn(32, SAMPLE_RATE)
    y = narrow(x, torch.full((32,), SAMPLE_RATE))
    power = torch.fft.rfft(y).abs().square()  # one bin per hertz
    assert (power[:, 6500:].sum(dim=1) < 0.02 * power.sum(dim=1)).all()
    telephone = power[:, 3800:].sum(dim=1) < 0.02 * power.sum(dim=1)
    deep = power[:, 20:200].sum(dim=1) / power[:, 1000:1180].sum(dim=1)
    assert 0 < telephone.sum() < 32
    assert (deep < 0.1).any() and (deep > 0.5).any()  # telephones have no bass, low-pass filters keep it
    assert telephone[deep < 0.1].all()


def test_mu_law_keeps_eight_bits():
    x = torch.linspace(-0.5, 0.5, 100_001)[None]
    y = mu_law(x)
    assert len(y.unique()) == 256
    assert (y - x).abs().max() < 0.02 and (mu_law(y) - y).abs().max() < 1e-6


@pytest.mark.parametrize("probability", [-0.1, 1.1])
def test_what_is_no_probability_is_refused(probability):
    with pytest.raises(ValueError, match=r"distortion\.room must be a probability"):
        DistortionConfig(room=probability)


def test_alone_in_its_batch_an_utterance_has_no_voice_beneath_it(batch):
    samples, lens = batch
    alone = Distortion(DistortionConfig(voices=1.0))(samples[:1], lens[:1])
    assert torch.equal(alone, samples[:1])
