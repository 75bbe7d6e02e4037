import types
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch

from asr.model.transformer import Output, Transformer
from asr.text.tokenizer import EOS
from asr.training.base import Training
from asr.training.config import LossConfig, OptimizerConfig
from asr.training.loss import (
    IGNORED,
    Losses,
    consistency_loss,
    ctc_losses,
    joint_loss,
    lens_for_ctc,
    smoothed_cross_entropy,
    targets,
)
from asr.training.module import SpeechTraining


def test_targets_end_and_then_are_ignored():
    Y, Y_lens = torch.tensor([[5, 6, 7], [8, 0, 0]]), torch.tensor([3, 1])
    assert targets(Y, Y_lens).tolist() == [[5, 6, 7, EOS], [8, EOS, IGNORED, IGNORED]]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_equals_torchs(smoothing):
    scores, labels = torch.randn(2, 4, 9), torch.tensor([[5, 6, 7, EOS], [8, EOS, IGNORED, IGNORED]])
    expected = torch.nn.functional.cross_entropy(
        scores.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, label_smoothing=smoothing, reduction="sum"
    )
    torch.testing.assert_close(smoothed_cross_entropy(scores.log_softmax(-1), labels, smoothing), expected)


def output(U: int = 3) -> tuple[Output, torch.Tensor, torch.Tensor]:
    Y, Y_lens = torch.randint(4, 9, (2, U)), torch.tensor([U, 1])
    log_probs, ctc = torch.randn(2, U + 1, 9).log_softmax(-1), torch.randn(2, 12, 9).log_softmax(-1)
    return Output(log_probs, Y_lens + 1, ctc[None], torch.randn(2, 12, 5), torch.tensor([12, 8])), Y, Y_lens


def test_the_joint_loss_weighs_its_parts():
    out, Y, Y_lens = output()
    parts = joint_loss(out, Y, Y_lens, LossConfig(ctc_weight=0.3))
    assert parts.total.item() == pytest.approx(0.3 * parts.ctc.item() + 0.7 * parts.attention.item())


def test_intermediate_predictions_have_their_share_of_ctc():
    out, Y, Y_lens = output()
    others = torch.randn(2, 2, 12, 9).log_softmax(-1)
    config = LossConfig(ctc_weight=1.0, intermediate_weight=0.4)
    alone = [joint_loss(out._replace(every_ctc=x[None]), Y, Y_lens, config).ctc.item() for x in others]
    losses = joint_loss(out._replace(every_ctc=torch.cat([out.every_ctc, others])), Y, Y_lens, config)
    assert losses.ctc == joint_loss(out, Y, Y_lens, config).ctc
    assert losses.total.item() == pytest.approx(0.6 * losses.ctc.item() + 0.4 * sum(alone) / 2)


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("subsampler", "by"), [("conv2d", 4), ("conv2d", 8), ("conv1d", 2), ("linear", 1)])
def test_lengths_are_known_before_the_forward_pass(tiny_config, subsampler, by, device):
    model = Transformer(replace(tiny_config, subsampler=subsampler, subsampling=by)).to(device)
    X_lens, Y_lens = torch.tensor([200, 121], device=device), torch.tensor([3, 7], device=device)
    lens = lens_for_ctc(model, X_lens, Y_lens)
    out = model(torch.randn(2, 200, tiny_config.input_dim, device=device), X_lens, Y_lens.new_ones(2, 7), Y_lens)
    assert lens().tolist() == [out.memory_lens.tolist(), [3, 7]]
    assert lens().device.type == "cpu"


def test_padding_has_no_loss():
    out, Y, Y_lens = output()
    other = out._replace(log_probs=out.log_probs.clone(), every_ctc=out.every_ctc.clone())
    other.log_probs[1, 2:] = 7.0
    other.ctc_log_probs[1, 8:] = -3.0
    losses = [joint_loss(o, Y, Y_lens, LossConfig()) for o in (out, other)]
    for ours, theirs in zip(*losses, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_what_cannot_be_aligned_has_no_loss_and_no_gradient():
    scores, Y = torch.randn(2, 12, 9, requires_grad=True), torch.tensor([[5, 5, 6]] * 2)
    lens = torch.tensor([12, 3])  # three frames have no room for the blank between equal labels
    losses = ctc_losses(scores.log_softmax(-1), Y, lens, torch.tensor([3, 3]))
    losses.sum().backward()
    assert losses[0] > 0 and losses[1] == 0
    assert scores.grad[0].any() and not scores.grad[1].any()


def each_alone(out: Output, Y: torch.Tensor, Y_lens: torch.Tensor):
    """Every utterance of a batch as a batch of its own."""
    for i, n in enumerate(Y_lens):
        one = slice(i, i + 1)
        log_probs, others = out.log_probs[one, : n + 1], (out.memory, out.memory_lens)
        part = Output(log_probs, out.lens[one], out.every_ctc[:, one], *(x[one] for x in others))
        yield part, Y[one, :n], Y_lens[one]


def test_the_loss_of_a_batch_is_the_token_mean_of_its_parts():
    batch = output()
    parts = sum(joint_loss(*part, LossConfig()).total * part[0].lens.sum() for part in each_alone(*batch))
    torch.testing.assert_close(joint_loss(*batch, LossConfig()).total * batch[0].lens.sum(), parts)


def test_what_each_process_minimises_averages_to_the_loss_of_the_whole(monkeypatch):
    batch = output()
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda count: count.copy_(batch[0].lens.sum()))
    # seven of the nine have no utterance
    process = types.SimpleNamespace(trainer=types.SimpleNamespace(world_size=9, accumulate_grad_batches=1))
    parts = [
        Training.in_update(process, joint_loss(*part, LossConfig()).total, part[0].lens.sum())
        for part in each_alone(*batch)
    ]
    torch.testing.assert_close(torch.stack(parts).sum() / 9, joint_loss(*batch, LossConfig()).total)


def test_the_loss_of_an_epoch_leaves_out_what_is_not_finite():
    logged = {}
    training = types.SimpleNamespace(train_sums=None, log_dict=logged.update, log_update=logged.update)
    training.trainer = types.SimpleNamespace(strategy=types.SimpleNamespace(reduce=lambda sums, reduce_op: sums))
    for tokens, loss in ((1, 2.0), (5, torch.inf), (3, 4.0)):
        Training.add_train(training, torch.tensor(tokens), {"total": torch.tensor(loss)})
    Training.add_train(training, torch.tensor(0), {"total": torch.tensor(9.0)}, empty=True)
    assert logged["train/total_step"] == 4.0
    Training.log_train_means(training)
    assert logged["train/total_epoch"].item() == pytest.approx((2.0 + 3 * 4.0) / 4)


def test_every_token_of_a_batch_and_every_end_weighs_as_much():
    losses = Losses(*[torch.tensor(2.0)] * len(Losses._fields))
    batch, weights = types.SimpleNamespace(lens=torch.tensor([9, 9]), Y_lens=torch.tensor([3, 1])), []
    training = types.SimpleNamespace(losses=lambda batch: losses, in_update=lambda mean, tokens: mean * tokens)
    training.add_train = lambda tokens, values, empty: weights.append(tokens.item())
    assert SpeechTraining.training_step(training, batch).item() == 2.0 * 6
    assert weights == [6]


@pytest.mark.parametrize(("takes", "masked"), [("matrix", True), ("text", False)])
def test_a_training_masks_what_is_no_text_and_asks_for_ctc_from_layers_between(monkeypatch, takes, masked):
    for name in ("joint_loss", "lens_for_ctc"):
        monkeypatch.setattr(f"asr.training.module.{name}", lambda *_: None)
    training = types.SimpleNamespace(spec_augment=MagicMock(), model=MagicMock())
    training.config = types.SimpleNamespace(loss=LossConfig(intermediate_ctc=2))
    training.model.front_end.config.takes = takes
    training.model.front_end.return_value = torch.zeros(1, 9, 4), torch.tensor([9])
    SpeechTraining.losses(training, MagicMock())
    assert training.model.transformer.call_args.args[-1] == 2
    assert training.spec_augment.called == masked


def test_gradients_are_no_longer_than_the_options_say():
    weight, logged = torch.nn.Parameter(torch.zeros(2)), {}
    training = types.SimpleNamespace(settings=OptimizerConfig(clip=2.0), parameters=lambda: [weight])
    training.skipped, training.log_update, training._fused = torch.zeros(2), logged.update, False
    training._weigh_gradients = lambda: None
    for gradient, clipped in (([3.0, 4.0], [1.2, 1.6]), ([0.3, 0.4], [0.3, 0.4])):
        weight.grad = torch.tensor(gradient)
        Training.on_before_optimizer_step(training, None)
        torch.testing.assert_close(weight.grad, torch.tensor(clipped))
        assert logged["train/gradient_norm"].item() == pytest.approx(torch.tensor(gradient).norm().item())


def test_updates_without_finite_gradients_are_counted_in_all_and_in_a_row():
    weight = torch.nn.Parameter(torch.zeros(1))
    training = types.SimpleNamespace(settings=OptimizerConfig(), parameters=lambda: [weight], skipped=torch.zeros(2))
    training._weigh_gradients, training.log_update, training._fused = lambda: None, lambda *_: None, False
    counts = []
    for gradient in (torch.nan, 1.0, torch.inf, -torch.inf, torch.nan):
        weight.grad = torch.tensor([gradient])
        Training.on_before_optimizer_step(training, None)
        counts.append(training.skipped.tolist())
    assert counts == [[1, 1], [1, 0], [2, 1], [3, 2], [4, 3]]


def test_updates_that_were_left_out_are_reported_once(caplog):
    training = types.SimpleNamespace(skipped=torch.tensor([2.0, 0.0]), reported=0)
    for _ in range(3):
        Training._report_skipped(training)
    assert caplog.text.count("2 updates have been skipped so far") == 1


def test_what_a_training_is_without_has_no_loss():
    out, Y, Y_lens = output()
    assert joint_loss(out, Y, Y_lens, LossConfig()).consistency is None
    without = joint_loss(out._replace(every_ctc=None), Y, Y_lens, LossConfig())
    assert without.ctc is None and without.total == without.attention


def two_views() -> tuple[Output, torch.Tensor, torch.Tensor]:
    Y, Y_lens = torch.randint(4, 9, (2, 3)), torch.tensor([3, 1])
    log_probs, ctc = torch.randn(4, 4, 9).log_softmax(-1), torch.randn(4, 12, 9).log_softmax(-1)
    out = Output(log_probs, Y_lens.repeat(2) + 1, ctc[None], torch.randn(4, 12, 5), torch.tensor([12, 8, 12, 8]))
    return out, Y.repeat(2, 1), Y_lens.repeat(2)


def test_consistency_is_the_divergence_of_each_view_from_the_other_over_the_real_frames():
    out, Y, Y_lens = two_views()
    parts = joint_loss(out, Y, Y_lens, LossConfig(ctc_weight=1.0, consistency=0.2))
    expected = 0.0
    for b, frames in ((0, 12), (1, 8)):
        first, second = (out.ctc_log_probs[row, :frames] for row in (b, b + 2))
        for told, teller in ((first, second), (second, first)):
            expected += torch.nn.functional.kl_div(told, teller, log_target=True, reduction="sum").item()
    assert parts.consistency.item() == pytest.approx(expected / out.lens.sum().item(), rel=1e-5)
    assert parts.total.item() == pytest.approx(parts.ctc.item() + 0.2 * parts.consistency.item(), rel=1e-5)


def test_views_that_agree_cost_nothing_and_the_teller_is_taken_as_given():
    out, Y, Y_lens = two_views()
    same = out.ctc_log_probs[:2].repeat(2, 1, 1)
    config = LossConfig(ctc_weight=1.0, consistency=0.2)
    assert joint_loss(out._replace(every_ctc=same[None]), Y, Y_lens, config).consistency.item() == pytest.approx(0)
    scores = torch.randn(4, 12, 9, requires_grad=True)
    loss = consistency_loss(scores.log_softmax(-1), torch.full((4,), 12))
    loss.backward()
    # the gradient of KL(teller || told) with respect to the scores of the told: told - teller
    told = scores.softmax(-1)
    torch.testing.assert_close(scores.grad, told - told.roll(2, dims=0), atol=1e-5, rtol=1e-4)
