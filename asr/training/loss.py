"""The joint loss: CTC and attention (Kim et al. 2017), with label smoothing (Szegedy et al. 2016) and CTC from
intermediate encoder layers (Lee & Watanabe 2021), without which a deep encoder stays long on CTC's plateau of blanks;
and consistency of CTC between two augmented views of an utterance (Yao et al. 2024, CR-CTC). The expected word errors
of `asr.training.minimum_wer` can be added to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from asr.model.decoder import IGNORED, targets
from asr.model.transformer import Output, Transformer
from asr.text.tokenizer import BLANK, EOS
from asr.training.config import LossConfig


class Losses(NamedTuple):
    """Natural-log losses per target token of the batch, scalars."""

    total: Tensor
    attention: Tensor
    ctc: Tensor | None = None  # None, here and below: the model or the training has no such loss
    consistency: Tensor | None = None
    word_errors: Tensor | None = None  # expected


def smoothed_cross_entropy(log_probs: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """The cross-entropy of `log_probs (B, T', V)` with (1 - smoothing) on the label and smoothing / V on every token,
    summed over the labels `(B, T')` that are not `IGNORED`."""
    kept = labels != IGNORED
    likelihood = log_probs.gather(2, labels.clamp(min=0)[:, :, None])[:, :, 0]
    loss = -(1 - smoothing) * likelihood - smoothing * log_probs.mean(dim=2)
    return loss.masked_fill(~kept, 0.0).sum()


def lens_for_ctc(transformer: Transformer, X_lens: Tensor, Y_lens: Tensor) -> Callable[[], Tensor]:
    """The lengths of memory and labels `(2, B)` on the CPU, where torch's CTC needs them. Called before the forward
    pass, it queues the copy on a GPU; taking the lengths later does not wait for that pass to end."""
    lens = torch.stack([transformer.encoder.subsampling.output_lens(X_lens), Y_lens])
    if not lens.is_cuda:
        return lens.cpu
    copy = lens.to("cpu", non_blocking=True)
    copied = torch.cuda.current_stream(lens.device).record_event()

    def take() -> Tensor:
        copied.synchronize()
        return copy

    return take


def joint_loss(
    output: Output,
    Y: Tensor,
    Y_lens: Tensor,
    config: LossConfig,
    eos: int = EOS,
    take_lens: Callable[[], Tensor] | None = None,
) -> Losses:
    """ctc_weight · CTC + (1 - ctc_weight) · cross-entropy, each summed over the batch and divided by its target
    tokens; only the cross-entropy for a model without a CTC head.

    `take_lens` comes from `lens_for_ctc`; None: the forward pass is waited for. If there are intermediate predictions,
    their mean loss has a share of `intermediate_weight` in the CTC loss. With `consistency` the second half of the
    batch is another view of the first."""
    tokens = output.lens.sum()
    attention = smoothed_cross_entropy(output.log_probs, targets(Y, Y_lens, eos), config.label_smoothing) / tokens
    if output.ctc_log_probs is None:
        return Losses(attention, attention.detach())
    # all layers in one call: on a GPU each row of a batch is a block of its own
    n = len(output.every_ctc)
    lens = (take_lens() if take_lens else torch.stack([output.memory_lens, Y_lens]).cpu()).repeat(1, n)
    of_rows = ctc_losses(output.every_ctc.flatten(0, 1), Y.repeat(n, 1), *lens)
    each = of_rows.unflatten(0, (n, -1)).sum(dim=1) / tokens
    ctc = of_ctc = each[0]
    if n > 1:
        w = config.intermediate_weight
        of_ctc = (1 - w) * ctc + w * each[1:].mean()
    difference = None
    if config.consistency:
        difference = consistency_loss(output.ctc_log_probs, output.memory_lens) / tokens
        of_ctc = of_ctc + config.consistency * difference
        difference = difference.detach()
    total = config.ctc_weight * of_ctc + (1 - config.ctc_weight) * attention
    return Losses(total, attention.detach(), ctc.detach(), difference)


def consistency_loss(log_probs: Tensor, lens: Tensor) -> Tensor:
    """The Kullback-Leibler divergence of each half of `log_probs (2 B, M, V)` from the other half, a target without
    gradient, summed over the real frames; `lens (2 B,)`."""
    both = log_probs.unflatten(0, (2, -1))
    wanted = both.flip(0).detach()
    each = (wanted.exp() * (wanted - both)).sum(dim=-1).flatten(0, 1)
    real = torch.arange(log_probs.shape[1], device=lens.device) < lens[:, None]
    return each.masked_fill(~real, 0.0).sum()


def ctc_losses(log_probs: Tensor, Y: Tensor, lens: Tensor, Y_lens: Tensor) -> Tensor:
    """-log P(Y) of each utterance by CTC, `(B,)`; `log_probs (B, M, V)`, Y `(B, U)`, and their lengths lens and Y_lens
    `(B,)`, preferably on the CPU.

    The loss of an utterance that cannot be aligned is zero."""
    # called by `torch.nn.functional.ctc_loss`, which first waits for a GPU to copy the labels from there (torch 2.11)
    lens, Y_lens = lens.tolist(), Y_lens.tolist()
    losses, _ = torch._ctc_loss(log_probs.transpose(0, 1), Y, lens, Y_lens, BLANK, zero_infinity=True)
    return losses.masked_fill(losses.isinf(), 0.0)
