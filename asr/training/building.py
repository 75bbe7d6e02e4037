"""What a training begins with: tokenizer and model, new or from a model folder."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from asr.model.encoder_model import EncoderModel
from asr.model.folder import read_folder
from asr.model.language_model import TextModel
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from asr.text.tokenizer import BPETokenizer, CharTokenizer, Tokenizer
from asr.training.config import TokenizerConfig, TrainConfig

CONFIG_OF_THE_VOCABULARY = ("prompt", "eos", "suppressed", "suppressed_first", "first_timestamp", "ctc")
CONFIG_OF_THE_DECODER = ("decoder_layers", "decoder_positions", "tie_output", "output_bias")
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


def load_origin(config: TrainConfig) -> SpeechModel | EncoderModel:
    """The recogniser or the encoder that `config.init_from` names. Raises ModelError for what is neither, ValueError
    for options that need a recogniser."""
    with read_folder(config.init_from) as (description, _):
        is_encoder = "encoder" in description
    if not is_encoder:
        return SpeechModel.load(config.init_from)
    if config.origin_share or config.new_tokenizer:
        raise ValueError(f"{config.init_from} is an encoder: neither origin_share nor new_tokenizer goes with it")
    return EncoderModel.load(config.init_from)


def adapt_model(origin: SpeechModel | EncoderModel, config: TrainConfig, tokenizer: Tokenizer) -> SpeechModel:
    """The model `origin`, writing with `tokenizer`, with the dropout of `config` and its lowest layers frozen.

    With another tokenizer than the model's own, what depends on the vocabulary begins anew, with a CTC head if `config`
    has one. With an encoder everything else begins anew, as `config` has it. Raises ValueError where there are fewer
    layers than are to be frozen."""
    if isinstance(origin, EncoderModel):
        shape, anew = origin.encoder.config, (*CONFIG_OF_THE_VOCABULARY, *CONFIG_OF_THE_DECODER)
        weights = {f"encoder.{name}": weight for name, weight in origin.encoder.state_dict().items()}
    else:
        shape, anew = origin.transformer.config, CONFIG_OF_THE_VOCABULARY if tokenizer != origin.tokenizer else ()
        weights = origin.transformer.state_dict()
        if anew:
            weights = {name: weight for name, weight in weights.items() if not name.startswith(OF_THE_VOCABULARY)}
    of_this_training = {name: getattr(config.model, name) for name in ("dropout", *anew)}
    shape = replace(shape, vocab_size=len(tokenizer), **of_this_training)
    if config.freeze_layers > shape.encoder_layers:
        raise ValueError(f"freeze_layers={config.freeze_layers}: {config.init_from} has {shape.encoder_layers} layers")
    model = SpeechModel(origin.front_end.config, Transformer(shape), tokenizer, config.data.normalizer)
    model.front_end.set_statistics(origin.front_end.mean, origin.front_end.std)
    model.transformer.load_state_dict(weights, strict=False)
    if config.freeze_layers:
        encoder = model.transformer.encoder
        for part in (encoder.subsampling, *encoder.layers[: config.freeze_layers]):
            part.requires_grad_(False)
    return model


def start_decoder(model: SpeechModel, text_model: TextModel) -> None:
    """Gives the decoder the weights of a language model of its shape: all but the attention to the encoder, whose
    output begins at zero, so that the decoder begins as that language model.

    Raises ValueError where a shape differs."""
    decoder, weights = model.transformer.decoder, {}
    for name, weight in text_model.transformer.state_dict().items():
        name = name.replace(".attention", ".self_attention")
        own = decoder.state_dict().get(name)
        if own is None or own.shape != weight.shape:
            raise ValueError(
                f"init_decoder_from: {name} is {tuple(weight.shape)} in the language model and"
                f" {'missing' if own is None else tuple(own.shape)} in the decoder: give both the same model options"
            )
        weights[name] = weight
    decoder.load_state_dict(weights, strict=False)
    for layer in decoder.layers:
        nn.init.zeros_(layer.cross_attention.output.weight)
