"""What a training begins with: tokenizer and model, new or from a model folder."""

from __future__ import annotations

from dataclasses import replace

from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from asr.text.tokenizer import BPETokenizer, CharTokenizer, Tokenizer
from asr.training.config import TokenizerConfig, TrainConfig

CONFIG_OF_THE_VOCABULARY = ("prompt", "eos", "suppressed", "suppressed_first", "first_timestamp", "ctc")
OF_THE_VOCABULARY = ("ctc.", "decoder.embedding.", "decoder.output.")


def build_tokenizer(config: TokenizerConfig, texts: list[str]) -> Tokenizer:
    """A tokenizer of the kind asked for, trained on normalised transcripts."""
    if config.kind == "char":
        return CharTokenizer.train(texts)
    return BPETokenizer.train(texts, config.vocab_size)


def build_model(config: TrainConfig, tokenizer: Tokenizer) -> SpeechModel:
    """A new model that writes with `tokenizer`."""
    shape = replace(config.model, vocab_size=len(tokenizer), input_dim=config.features.dim)
    return SpeechModel(config.features, Transformer(shape), tokenizer, config.data.normalizer)


def adapt_model(origin: SpeechModel, config: TrainConfig, tokenizer: Tokenizer) -> SpeechModel:
    """The model `origin`, writing with `tokenizer`, with the dropout of `config` and its lowest layers frozen.

    With another tokenizer than the model's own, what depends on the vocabulary begins anew, with a CTC head if `config`
    has one. Raises ValueError where there are fewer layers than are to be frozen."""
    shape = replace(origin.transformer.config, dropout=config.model.dropout)
    if tokenizer != origin.tokenizer:
        of_the_vocabulary = {name: getattr(config.model, name) for name in CONFIG_OF_THE_VOCABULARY}
        shape = replace(shape, vocab_size=len(tokenizer), **of_the_vocabulary)
    if config.freeze_layers > shape.encoder_layers:
        raise ValueError(f"freeze_layers={config.freeze_layers}: {config.init_from} has {shape.encoder_layers} layers")
    model = SpeechModel(origin.front_end.config, Transformer(shape), tokenizer, config.data.normalizer)
    model.front_end.set_statistics(origin.front_end.mean, origin.front_end.std)
    weights = origin.transformer.state_dict()
    if tokenizer != origin.tokenizer:
        weights = {name: weight for name, weight in weights.items() if not name.startswith(OF_THE_VOCABULARY)}
    model.transformer.load_state_dict(weights, strict=False)
    if config.freeze_layers:
        encoder = model.transformer.encoder
        for part in (encoder.subsampling, *encoder.layers[: config.freeze_layers]):
            part.requires_grad_(False)
    return model
