"""What a training starts with: tokenizer and model, new or from a model folder."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from asr.model.config import ModelConfig
from asr.model.deepening import deepen
from asr.model.encoder_model import EncoderModel
from asr.model.folder import ModelError, described
from asr.model.language_model import LanguageModel, TextModel
from asr.model.lora import add_low_rank
from asr.model.speech_model import SpeechModel
from asr.model.transformer import CONFIG_OF_THE_VOCABULARY, OF_THE_VOCABULARY, Transformer
from asr.text.loading import load_tokenizer
from asr.text.tokenizer import CharTokenizer, SubwordTokenizer, Tokenizer
from asr.training.config import TokenizerConfig, TrainConfig
from asr.training.vocabulary import transfer_vocabulary

CONFIG_OF_THE_DECODER = (
    "decoder_layers", "decoder_positions", "max_positions", "tie_output", "output_bias", "tokens_per_frame",
)  # fmt: skip
OF_THE_TOKENS = ("embedding.", "output.")  # of a language model: each has a row for every token
OF_A_LANGUAGE_MODEL = (  # what a decoder and the language model that it starts as must have in common
    "d_model", "num_heads", "d_k", "d_v", "ffn_dim", "activation", "norm_first", "decoder_layers",
    "attention_bias", "key_bias", "positions_of_decoder", "first_position", "max_positions", "scale_embedding",
    "tie_output", "output_bias",
)  # fmt: skip


def build_tokenizer(config: TokenizerConfig, texts: list[str]) -> Tokenizer:
    """A tokenizer of the configured kind, trained on normalised transcripts."""
    if config.kind == "char":
        return CharTokenizer.train(texts)
    return SubwordTokenizer.train(texts, config.vocab_size, config.kind)


class Writing(NamedTuple):
    """How a model writes: its tokenizer and its normaliser."""

    tokenizer: Tokenizer
    normalizer_name: str


def writing_of(folder: str) -> Writing:
    """How the model in `folder` writes. Raises ValueError if the folder holds no model, or another toolkit's tokenizer,
    which has no blank."""
    try:
        with described(folder, "model", "language_model") as description:
            writing = Writing(load_tokenizer(folder), description["normalizer"])
    except ModelError as error:
        raise ValueError(f"tokenizer.folder: {error}") from None
    if not isinstance(writing.tokenizer, CharTokenizer | SubwordTokenizer):
        raise ValueError(f"tokenizer.folder: the tokenizer of {folder} only fits its own model (init_from)")
    return writing


def build_model(config: TrainConfig, tokenizer: Tokenizer) -> SpeechModel:
    """A new model that writes with `tokenizer`."""
    shape = replace(config.model, vocab_size=len(tokenizer), input_dim=config.features.dim)
    return SpeechModel(config.features, Transformer(shape), tokenizer, config.data.normalizer_name)


def load_origin(config: TrainConfig) -> SpeechModel | EncoderModel:
    """The recogniser or the encoder that `config.init_from` names. Raises ModelError if it is neither, ValueError if it
    is an encoder and options need a recogniser."""
    with described(config.init_from, "model", "encoder") as description:
        is_encoder = "encoder" in description
    if not is_encoder:
        return SpeechModel.load(config.init_from)
    if config.origin_share or config.new_tokenizer or config.lora_rank:
        raise ValueError(
            f"{config.init_from} is an encoder: origin_share, new_tokenizer and lora_rank need a recogniser"
        )
    return EncoderModel.load(config.init_from)


def adapt_model(origin: SpeechModel | EncoderModel, config: TrainConfig, tokenizer: Tokenizer) -> SpeechModel:
    """The model `origin`, writing with `tokenizer`, with the dropout of `config`, layers inserted between its encoder's
    (`asr.model.deepening`) and its lowest layers frozen.

    With a tokenizer other than the model's own, the weights that depend on the vocabulary start from those of the
    model's own tokens (`asr.training.vocabulary`), with a CTC head if `config` has one. If `origin` is an encoder, all
    other weights start from scratch, as configured. Either can be given a window for the encoder's attention. Raises
    ValueError if there are fewer layers than are to be frozen or added."""
    if isinstance(origin, EncoderModel):
        shape, anew = origin.encoder.config, (*CONFIG_OF_THE_VOCABULARY, *CONFIG_OF_THE_DECODER)
        if shape.positions == "learned":  # in a table, whose length belongs to the encoder
            anew = tuple(name for name in anew if name != "max_positions")
        weights = {f"encoder.{name}": weight for name, weight in origin.encoder.state_dict().items()}
    else:
        shape, anew = origin.transformer.config, CONFIG_OF_THE_VOCABULARY if tokenizer != origin.tokenizer else ()
        weights = origin.transformer.state_dict()
        if anew:
            weights = {name: weight for name, weight in weights.items() if not name.startswith(OF_THE_VOCABULARY)}
    of_this_training = {name: getattr(config.model, name) for name in ("dropout", *anew)}
    if config.model.attention_window:
        of_this_training |= {name: getattr(config.model, name) for name in ("attention_left", "attention_right")}
    shape = replace(shape, vocab_size=len(tokenizer), **of_this_training)
    if config.freeze_layers > shape.encoder_layers:
        raise ValueError(f"freeze_layers={config.freeze_layers}: {config.init_from} has {shape.encoder_layers} layers")
    transformer = Transformer(shape)
    transformer.load_state_dict(weights, strict=False)
    if isinstance(origin, SpeechModel) and anew:
        transfer_vocabulary(
            {name: rows for name, rows in transformer.state_dict().items() if name.startswith(OF_THE_VOCABULARY)},
            origin.transformer.state_dict(),
            tokenizer,
            origin.tokenizer,
        )
    # chosen before layers are copied: the copies are trained
    frozen = [*transformer.encoder.layers[: config.freeze_layers]]
    if not (anew and shape.subsampler == "embedding"):  # whose rows of new tokens have to be learnt
        frozen.append(transformer.encoder.subsampling)
    deepen(transformer, config.add_layers)
    model = SpeechModel(origin.front_end.config, transformer, tokenizer, config.data.normalizer_name)
    model.front_end.set_statistics(origin.front_end.mean, origin.front_end.std)
    if config.freeze_layers:
        for part in frozen:
            part.requires_grad_(False)
    return model


def to_train(model: SpeechModel, config: TrainConfig) -> SpeechModel:
    """A copy of the model, to be trained in its place. With `config.lora_rank` only the matrices that are added to its
    layers (`asr.model.lora`) are trained and, with a new tokenizer, the weights that depend on the vocabulary."""
    learner = deepcopy(model)
    if config.lora_rank:
        add_low_rank(learner.transformer, config.lora_rank, OF_THE_VOCABULARY if config.new_tokenizer else ())
    return learner


def adapt_language_model(origin: TextModel, config: ModelConfig, tokenizer: Tokenizer, more: int = 0) -> LanguageModel:
    """The language model `origin` over the tokens of `tokenizer`, with the dropout and the vocabulary's fields from
    `config`, and `more` additional layers (`asr.model.deepening`). Every token starts from the tokens of `origin` that
    spell it (`asr.training.vocabulary`). Raises ValueError if `more` exceeds the number of its layers."""
    of_this_training = {name: getattr(config, name) for name in ("dropout", "vocab_size", *CONFIG_OF_THE_VOCABULARY)}
    model = LanguageModel(replace(origin.transformer.config, **of_this_training))
    weights, known = model.state_dict(), origin.transformer.state_dict()
    of_the_tokens = {name: rows for name, rows in weights.items() if name.startswith(OF_THE_TOKENS)}
    model.load_state_dict({name: known[name] for name in weights if name not in of_the_tokens}, strict=False)
    transfer_vocabulary(of_the_tokens, known, tokenizer, origin.tokenizer)
    deepen(model, more)
    return model


def start_decoder(model: SpeechModel, text_model: TextModel) -> None:
    """Copies the weights of a language model of the same shape into the decoder. The attention to the encoder is the
    exception: its output starts at zero, so that the decoder starts as that language model.

    Raises ValueError naming the option in which their shapes differ."""
    decoder, language_model = model.transformer.decoder, text_model.transformer
    for name in OF_A_LANGUAGE_MODEL:
        ours, theirs = getattr(decoder.config, name), getattr(language_model.config, name)
        if ours != theirs:
            raise ValueError(f"init_decoder_from: model.{name} is {theirs} in the language model, and {ours} here")
    weights = language_model.state_dict()
    decoder.load_state_dict(
        {name.replace(".attention", ".self_attention"): weight for name, weight in weights.items()}, strict=False
    )
    for layer in decoder.layers:
        for parameter in layer.cross_attention.output.parameters():
            nn.init.zeros_(parameter)
