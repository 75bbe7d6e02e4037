"""The training of a language model from start to finish: text, fit, export."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from asr.model.decoder import targets
from asr.model.language_model import LanguageModel, TextModel
from asr.model.speech_model import SpeechModel
from asr.text.loading import load_tokenizer, save_tokenizer
from asr.training.averaging import BestCheckpoints, average_checkpoints, best_checkpoints
from asr.training.base import Training
from asr.training.building import adapt_language_model
from asr.training.callbacks import EpochTimer
from asr.training.config import LMTrainConfig
from asr.training.loss import smoothed_cross_entropy
from asr.training.text import TextData
from asr.training.trainer import begin, lightning_trainer

logger = logging.getLogger(__name__)


class LanguageModelTraining(Training):
    """Trains a `LanguageModel` to predict each token of a line, and its end, from the tokens before."""

    stack = "model"

    def __init__(self, config: LMTrainConfig, model: LanguageModel, updates: int):
        super().__init__(config, updates)
        self.model = model

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        Y, Y_lens = batch
        tokens = (Y_lens + 1).sum()
        loss = self._loss(Y, Y_lens, self.config.label_smoothing) / tokens
        self.add_train(tokens, {"loss": loss})
        return self.in_update(loss, tokens)

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        if len(batch[1]):
            tokens = (batch[1] + 1).sum()
            self.add_dev(tokens, self._loss(*batch, 0.0) / tokens)

    def _loss(self, Y: Tensor, Y_lens: Tensor, smoothing: float) -> Tensor:
        """The loss summed over the tokens and ends of lines, in nats."""
        log_probs = self.model.teacher_forced(Y)
        labels = targets(Y, Y_lens, self.model.config.eos)
        return smoothed_cross_entropy(log_probs, labels, smoothing)


class PerplexityLine(EpochTimer):
    """One line per epoch: perplexity, tokens per second, time left."""

    def __init__(self, tokens: int):
        self.tokens = tokens

    def on_train_epoch_end(self, trainer: L.Trainer, module: LanguageModelTraining) -> None:
        super().on_train_epoch_end(trainer, module)
        took, left = self.took_and_left(trainer)
        perplexity = trainer.callback_metrics["dev/loss"].exp()
        epoch, rate = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}", self.tokens / took
        logger.info("%s: dev perplexity %.2f; %.0f tokens per second, %.1f min left", epoch, perplexity, rate, left)


def train_language_model(config: LMTrainConfig) -> tuple[Path, float]:
    """Trains, and exports the model of the best epoch. Returns its folder and its perplexity per token on dev.

    Raises ValueError for data or options that cannot be used, FileExistsError if `config.out` holds a training that is
    not to be resumed."""
    out = Path(config.out)
    last = begin(config)
    recognizer = SpeechModel.load(config.tokenizer)
    if not last:
        save_tokenizer(recognizer.tokenizer, config.out)
    elif load_tokenizer(config.out) != recognizer.tokenizer:
        raise ValueError(f"resume=true: {config.tokenizer} has another tokenizer than when this training started")
    written = recognizer.transformer.config
    # as the search feeds and reads it; without a CTC head any token may be the end
    special = {"prompt": written.prompt[-1:], "eos": written.eos, "ctc": written.ctc}
    shape = replace(config.model, vocab_size=len(recognizer.tokenizer), **special)
    if config.init_from:
        origin = TextModel.load(config.init_from)
        model = adapt_language_model(origin, shape, recognizer.tokenizer, config.add_layers)
    else:
        model = LanguageModel(shape)
    longest = model.config.longest_transcript
    data = TextData(config.data, recognizer.tokenizer, recognizer.normalize, config.seed, longest)
    best = BestCheckpoints(data, out, "dev/loss", 4)
    board = TensorBoardLogger(out, name="tensorboard", version="")
    trainer = lightning_trainer(config, [best, PerplexityLine(data.tokens)], logger=board)
    updates = config.epochs * data.updates_per_epoch(trainer.world_size)
    if not updates:
        raise ValueError(
            f"data.train has fewer batches than the {trainer.world_size} processes: lower data.batch_tokens"
        )
    module = LanguageModelTraining(config, model, updates)
    parameters = sum(p.numel() for p in model.parameters())
    extent = f"{len(data.train_lines):,} lines, {data.tokens:,} tokens, {updates:,} updates, {parameters:,} parameters"
    logger.info("%s; for dev %s lines", extent, f"{len(data.dev_lines):,}")
    trainer.fit(module, data, ckpt_path=last, weights_only=True)
    module.load_state_dict(average_checkpoints(best_checkpoints(out)[:1], prefix=""))
    trainer.validate(module, data, verbose=False)
    perplexity = trainer.callback_metrics["dev/loss"].exp().item()
    folder = out / "model"
    if trainer.is_global_zero:
        TextModel(model, recognizer.tokenizer, recognizer.normalizer_name).save(folder, config.export)
    logger.info("dev perplexity %.2f per token; the language model is in %s", perplexity, folder)
    if perplexity > shape.vocab_size / 2:
        remedy = "more epochs, more text, or init_from=MODEL, which starts from a trained one"
        logger.warning("it is hardly better than guessing among the %d tokens: it needs %s", shape.vocab_size, remedy)
    return folder, perplexity
