import math

import pytest
import torch

from asr.model.best_rq import MaskedPrediction, RandomProjectionQuantizer
from asr.model.config import MaskedPredictionConfig, ModelConfig
from asr.model.encoder import Encoder
from asr.model.masks import length_mask

CONFIG = MaskedPredictionConfig(codebooks=2, codes=16, code_dim=4)


def masked_prediction(factor: int = 4, kind: str = "conv2d", **settings) -> MaskedPrediction:
    size = {"d_model": 32, "encoder_layers": 1, "ffn_dim": 64, "subsampling_channels": 4, "input_dim": 20}
    shape = ModelConfig(subsampler=kind, subsampling=factor, **size)
    return MaskedPrediction(Encoder(shape), 20, MaskedPredictionConfig(codebooks=2, codes=16, code_dim=4, **settings))


def test_the_code_is_the_nearest_of_the_codebook_after_the_projection():
    quantizer = RandomProjectionQuantizer(6, CONFIG)
    x = torch.randn(3, 5, 6)
    codes = quantizer(x)
    assert codes.shape == (3, 5, 2)
    for n in range(2):
        projected = torch.nn.functional.normalize(x @ quantizer.projection[n], dim=-1)
        distance = torch.cdist(projected, quantizer.codes[n].expand(3, -1, -1))
        assert torch.equal(codes[:, :, n], distance.argmin(dim=-1))
    assert torch.equal(quantizer(7 * x), codes)  # the lengths of the vectors do not matter


def test_the_quantiser_never_learns():
    module = masked_prediction()
    assert not list(module.quantizer.parameters())
    assert {"quantizer.projection", "quantizer.codes"} < set(module.state_dict())


def test_masked_stretches_have_their_length_and_share():
    module = masked_prediction(mask_start=0.01, mask_frames=40)
    mask = module.draw_mask(torch.zeros(50, 2000, 20))
    assert mask[:, 100:].float().mean() == pytest.approx(1 - 0.99**40, abs=0.03)
    for row in mask:
        edges = torch.diff(row.int(), prepend=torch.zeros(1, dtype=torch.int32))
        begins, ends = (edges == 1).nonzero()[:, 0], (edges == -1).nonzero()[:, 0]
        lengths = ends - begins[: len(ends)]
        assert (lengths >= 40).all()


def test_noise_is_put_in_the_place_of_what_is_masked_alone():
    module = masked_prediction(mask_noise=0.1)
    X, mask = torch.full((4, 500, 20), 3.0), torch.zeros(4, 500, dtype=torch.bool)
    mask[:, 100:200] = True
    masked = module.masked(X, mask)
    assert torch.equal(masked[~mask], X[~mask])
    assert masked[mask].std() == pytest.approx(0.1, rel=0.05) and abs(float(masked[mask].mean())) < 0.01


@pytest.mark.parametrize(
    ("kind", "factor"),
    [*(("conv2d", factor) for factor in (2, 4, 6, 8)), ("conv1d", 2), ("conv1d_glu", 4), ("linear", 1)],
)
def test_an_encoder_frame_predicts_the_middle_of_what_it_sees(kind, factor):
    module = masked_prediction(factor, kind)
    X = torch.randn(1, 100, 20, requires_grad=True)
    frames, (length,) = module.encoder.subsampling(X, torch.tensor([100]))
    middle = module.middle(torch.arange(1, 101)[None, :, None], length)[0, :, :, 0]
    first = middle[4, 0] - 4 * factor
    everything = torch.arange(first, first + length * factor)
    everything[(everything < 1) | (everything > 100)] = 0  # beyond the first and the last frame
    assert torch.equal(middle, everything.view(length, factor))
    for m in range(length) if kind == "conv2d" else range(4, length - 4):  # the others see padding, too
        (gradient,) = torch.autograd.grad(frames[0, m].square().sum(), X, retain_graph=True)
        seen = gradient[0].any(dim=1).nonzero()[:, 0] + 1
        before, after = middle[m, 0] - seen[0], seen[-1] - middle[m, -1]
        assert 0 <= after - before <= 1


def test_the_masked_loss_is_of_the_real_frames_that_are_wholly_masked():
    module = masked_prediction(mask_start=0.02, mask_frames=20).eval()
    X, lens = torch.randn(2, 400, 20), torch.tensor([400, 200])
    torch.manual_seed(3)
    with torch.no_grad():
        first = module(X, lens)
    torch.manual_seed(3)
    mask = module.draw_mask(X)
    covered = module.middle(mask[:, :, None], 99)[..., 0].all(dim=2)
    lengths = module.encoder.subsampling.output_lens(lens)
    hidden = sum(int(covered[b, :n].sum()) for b, n in enumerate(lengths))
    assert 0 < hidden < int(lengths.sum())
    changed = X.clone()
    changed[1, 200:] = 9.0  # padding
    torch.manual_seed(3)
    with torch.no_grad():
        padded = module(changed, lens)
    assert first.frames == padded.frames == hidden
    for ours, theirs in zip(padded[:3], first[:3], strict=True):
        torch.testing.assert_close(ours, theirs)
    for loss in (first.masked_loss, first.visible_loss):
        assert 0.5 * math.log(16) < float(loss) < 2 * math.log(16)
    assert 0 <= float(first.accuracy) <= 1


def test_each_loss_is_of_its_frames_and_the_codes_are_those_of_what_was_there():
    module = masked_prediction(mask_start=0.02, mask_frames=20).eval()
    read = []
    module.output.register_forward_pre_hook(lambda _, args: read.append(args[0]))
    X, lens = torch.randn(2, 400, 20), torch.tensor([400, 200])
    torch.manual_seed(3)
    found = module(X, lens)
    (memory,) = read
    torch.manual_seed(3)
    covered = module.middle(module.draw_mask(X)[:, :, None], 99)[..., 0]
    real = ~length_mask(module.encoder.subsampling.output_lens(lens), 99)[:, 0, 0]
    hidden, visible = covered.all(dim=2) & real, ~covered.any(dim=2) & real
    for loss, frames in ((found.masked_loss, hidden), (found.visible_loss, visible)):
        (gradient,) = torch.autograd.grad(loss, memory, retain_graph=True)
        assert torch.equal(gradient.any(dim=2), frames)
    codes = module.quantizer(module.middle(X, 99).mean(dim=2))[hidden]
    scores = module.output(memory)[hidden].unflatten(1, (2, 16))
    torch.testing.assert_close(found.accuracy, (scores.argmax(dim=2) == codes).float().mean())
    torch.testing.assert_close(found.masked_loss, torch.nn.functional.cross_entropy(scores.mT, codes))


def test_what_was_masked_does_not_reach_the_encoder():
    module = masked_prediction(mask_start=0.5, mask_frames=400).eval()  # all from the first drawn frame on
    X, lens = torch.randn(1, 400, 20), torch.tensor([400])
    torch.manual_seed(3)
    mask = module.draw_mask(X)
    noise_only = module.masked(X, mask)[mask]
    assert noise_only.abs().max() < 1
    X.requires_grad_()
    torch.manual_seed(3)
    module(X, lens).masked_loss.backward()
    assert not X.grad[mask].any()


def test_nothing_masked_has_no_loss():
    module = masked_prediction(mask_start=1e-9)
    found = module(torch.randn(1, 100, 20), torch.tensor([100]))
    assert found.masked_loss == 0 and found.frames == 0 and found.accuracy == 0 and found.visible_loss > 0


def test_a_stretch_too_short_to_hide_an_encoder_frame_is_refused():
    with pytest.raises(ValueError, match=r"mask_frames=3 never hides a whole encoder frame of 4"):
        masked_prediction(mask_frames=3)


@pytest.mark.parametrize(
    "wrong", [{"codes": 1}, {"mask_frames": 0}, {"mask_start": 0.0}, {"mask_start": 1.0}, {"mask_noise": -1.0}]
)
def test_wrong_settings_name_the_option(wrong):
    with pytest.raises(ValueError, match="masked_prediction"):
        MaskedPredictionConfig(**wrong)
