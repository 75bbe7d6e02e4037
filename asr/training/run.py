"""A training from start to finish: data, tokenizer, statistics, fit, averaging, export."""

from __future__ import annotations

import logging
from dataclasses import asdict, fields, replace
from pathlib import Path

import lightning as L

from asr.audio.config import DistortionConfig
from asr.decode.search import check_options
from asr.decode.tuning import LANGUAGE_MODEL, TUNING
from asr.model.bigram import MOST_TOKENS, Bigram
from asr.model.language_model import TextModel
from asr.model.speech_model import SpeechModel
from asr.text.loading import load_tokenizer, save_tokenizer
from asr.training.averaging import EMA, BestCheckpoints, average_checkpoints, best_checkpoints, figure_of, interpolate
from asr.training.building import (
    adapt_model,
    build_model,
    build_tokenizer,
    load_origin,
    start_decoder,
    to_train,
    writing_of,
)
from asr.training.callbacks import EpochLine, Patience, Samples
from asr.training.config import OF_THE_REST, TokenizerConfig, TrainConfig
from asr.training.data import SpeechData
from asr.training.module import SpeechTraining
from asr.training.report import write_report
from asr.training.trainer import begin, device_count, extent, new_trainer, set_statistics

logger = logging.getLogger(__name__)


def train(config: TrainConfig) -> tuple[Path, float]:
    """Trains, averages the best checkpoints and exports the model. Returns its folder and its dev WER in percent.

    Raises ValueError for data or options that cannot be used, FileExistsError if `config.out` holds a training that is
    not to be resumed."""
    out = Path(config.out)
    last = begin(config)
    origin = load_origin(config) if config.init_from else None
    text_model = TextModel.load(config.init_decoder_from) if config.init_decoder_from else None
    writes = text_model or (origin if isinstance(origin, SpeechModel) and not config.new_tokenizer else None)
    if config.tokenizer.folder and not last:
        if writes:
            raise ValueError("tokenizer.folder: init_from and init_decoder_from bring a tokenizer (new_tokenizer=true)")
        writes = writing_of(config.tokenizer.folder)
    if writes and not last and replace(config.tokenizer, folder="") != TokenizerConfig():
        logger.info(
            "the model's own tokenizer is used; tokenizer.kind and tokenizer.vocab_size of the options are ignored"
        )
    data = SpeechData(config.data, config.seed, device_count(config), writes.normalizer_name if writes else None)
    if last:
        tokenizer = load_tokenizer(out)
    elif writes:
        tokenizer = writes.tokenizer
    else:
        tokenizer = build_tokenizer(config.tokenizer, data.texts())
    model = adapt_model(origin, config, tokenizer) if origin else build_model(config, tokenizer)
    _take_shape(config, model)
    if text_model:
        start_decoder(model, text_model)
    _check_config(config, model, begun=isinstance(origin, SpeechModel) and tokenizer == origin.tokenizer)
    data.fit_to(model)
    if not last:
        save_tokenizer(tokenizer, out)
    learner = to_train(model, config)
    trainer, updates = new_trainer(config, data, learner, _callbacks(config, data, out))
    module = SpeechTraining(config, learner, updates)
    if not last and not origin and config.features.takes != "text":
        set_statistics(module.model.front_end, data)
    trainer.fit(module, data, ckpt_path=last, weights_only=True)
    best, wer = _take_average(model, config, data, trainer, updates)
    model.trained_seconds = data.usual_seconds
    folder = out / "model"
    summary = f"dev WER {wer:.2f} % (average of {best} checkpoints)"
    if trainer.is_global_zero:
        _save(model, config, data, folder)
        write_report(out, f"{summary}; {extent(data, learner)}", asdict(config))
    logger.info("%s; the model is in %s, the curves in %s", summary, folder, out / "report.html")
    return folder, wer


def _take_average(
    model: SpeechModel, config: TrainConfig, data: SpeechData, trainer: L.Trainer, updates: int
) -> tuple[int, float]:
    """Loads the average of the best checkpoints into the model, which is still as it was before the training. Returns
    the number of checkpoints and its dev WER in percent."""
    best = best_checkpoints(Path(config.out))[: config.averaged]
    weights = average_checkpoints(best)
    if config.origin_share:
        weights = interpolate(weights, model.state_dict(), config.origin_share)
    model.load_state_dict(weights)
    # whether the checkpoints' figures are of weights as they are here, and of this dev set
    comparable = not config.origin_share and not data.earlier_dev_set
    if comparable and len(best) == 1:
        return 1, figure_of(best[0])
    # the moving average would replace the weights that are to be validated
    trainer.callbacks = [callback for callback in trainer.callbacks if not isinstance(callback, EMA)]
    wer = trainer.validate(SpeechTraining(config, model, updates), data, verbose=False)[0]["dev/wer"]
    if comparable and wer > 1.1 * figure_of(best[0]) + 0.5:  # the epochs had little in common
        logger.warning(
            "the average of %d checkpoints has a dev WER of %.2f %%: the best one alone is kept", len(best), wer
        )
        model.load_state_dict(average_checkpoints(best[:1]))
        return 1, figure_of(best[0])
    return len(best), wer


def _save(model: SpeechModel, config: TrainConfig, data: SpeechData, folder: Path) -> None:
    """Saves the model, with the bigram of its transcripts if the vocabulary is small enough; reports a tuning in the
    folder that is for other weights, and a language model that is not in it."""
    if len(model.tokenizer) <= MOST_TOKENS:
        tokens = map(model.tokenizer.encode, data.transcripts())
        model.transformer.bigram = Bigram.of(tokens, model.transformer.config)
    model.save(folder, config.export)
    if (folder / TUNING).exists():
        logger.warning("%s was tuned for other weights: run asr.tune --write again", folder / TUNING)
    language_model = Path(config.init_from, LANGUAGE_MODEL)
    if config.init_from and not config.new_tokenizer and language_model.is_dir():
        logger.info(
            "init_from has a language model, which is not in %s yet: asr.tune DEV --model %s --lm %s"
            " --lm-weights 0 0.3 0.5 0.7 --ilm-weights 0 0.5 --write adopts it where it helps",
            folder,
            folder,
            language_model,
        )


def _take_shape(config: TrainConfig, model: SpeechModel) -> None:
    """Writes the model's shape and features into `config`, which is saved with the training: if `init_from` names a
    model, that model's count."""
    for name, theirs in (("features", model.front_end.config), ("model", model.transformer.config)):
        ours = getattr(config, name)
        asked = [field.name for field in fields(theirs) if field.name not in OF_THE_REST]
        others = [field for field in asked if getattr(ours, field) != getattr(theirs, field)]
        if config.init_from and others:
            said = ", ".join(f"{other} {getattr(theirs, other)} ({getattr(ours, other)})" for other in others)
            logger.info("init_from: %s settings are the loaded model's, not the options' (in brackets): %s", name, said)
        setattr(config, name, theirs)


def _check_config(config: TrainConfig, model: SpeechModel, begun: bool) -> None:
    """Raises ValueError for options that the model does not support, that leave nothing to train, or that do not train
    a part needed for decoding, unless it was trained before (`begun`)."""
    takes, weight = model.front_end.config.takes, config.loss.ctc_weight
    if config.distortion != DistortionConfig() and takes != "sound":
        raise ValueError(f"distortion is for sound, but this model takes {takes}")
    if config.loss.consistency and not model.transformer.ctc:
        raise ValueError("loss.consistency needs CTC, and this model has no CTC head")
    try:
        check_options(model.transformer, config.validation)
    except ValueError as error:
        raise ValueError(f"validation: {error}") from None
    if config.lora_rank and weight == 1 and begun and config.freeze_layers == model.transformer.config.encoder_layers:
        raise ValueError("lora_rank with freeze_layers of all layers and loss.ctc_weight=1 leaves nothing to train")
    if not model.transformer.ctc or begun:
        return
    if weight == 0:
        raise ValueError("loss.ctc_weight=0 trains no CTC head: model.ctc=false validation.ctc_weight=0 leave it out")
    if weight == 1 and config.validation.strategy != "ctc":
        raise ValueError(
            "loss.ctc_weight=1 trains no decoder: validation.strategy=ctc does without it, and later --strategy ctc"
        )


def _callbacks(config: TrainConfig, data: SpeechData, out: Path) -> list[L.Callback]:
    best = BestCheckpoints(data, out, "dev/wer", 2, config.averaged, weights_only=not config.ema)
    callbacks = [best, EpochLine(data.train_seconds, {"dev/wer": "dev WER {:.2f} %"}), Samples()]
    if config.ema:
        callbacks.append(EMA(config.ema))
    if config.patience:
        callbacks.append(Patience(config.patience, data))
    return callbacks
