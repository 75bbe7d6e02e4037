"""Import of other toolkits' checkpoints (Whisper from OpenAI, Whisper and Speech2Text from Hugging Face), and export to
Hugging Face. Weights keep their values and change their names; all other differences are settings in `ModelConfig`.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from asr.audio.config import FeatureConfig
from asr.model.config import ModelConfig
from asr.model.folder import CONFIG, UNREADABLE, WEIGHTS, ModelError, WithoutStartValues, write_json, write_tensors
from asr.model.positions import sinusoids_in_halves
from asr.model.speech_model import SpeechModel
from asr.model.transformer import Transformer
from asr.text.loading import save_tokenizer
from asr.text.speech2text import Speech2TextTokenizer
from asr.text.tokenizer import Tokenizer
from asr.text.whisper import WhisperTokenizer

# parts of our weights' names and their replacements in the other toolkit's names, applied in order
Renaming = tuple[tuple[str, str], ...]
HUGGING_FACE: Renaming = (
    ("encoder.", "model.encoder."),
    ("decoder.", "model.decoder."),
    ("subsampling.convolutions.0", "conv1"),
    ("subsampling.convolutions.1", "conv2"),
    ("cross_attention_residual.norm", "encoder_attn_layer_norm"),
    ("self_attention_residual.norm", "self_attn_layer_norm"),
    ("attention_residual.norm", "self_attn_layer_norm"),
    ("ffn_residual.norm", "final_layer_norm"),
    ("cross_attention", "encoder_attn"),
    ("self_attention", "self_attn"),
    (".attention", ".self_attn"),
    (".query", ".q_proj"),
    (".key", ".k_proj"),
    (".value", ".v_proj"),
    ("attn.output", "attn.out_proj"),
    ("ffn.0", "fc1"),
    ("ffn.3", "fc2"),
    ("coder.norm", "coder.layer_norm"),
    ("embedding", "embed_tokens"),
    ("positions.table", "embed_positions"),
)
SPEECH2TEXT: Renaming = (("subsampling.convolutions", "conv.conv_layers"), *HUGGING_FACE)
OPENAI: Renaming = (
    ("subsampling.convolutions.0", "conv1"),
    ("subsampling.convolutions.1", "conv2"),
    ("layers", "blocks"),
    ("cross_attention_residual.norm", "cross_attn_ln"),
    ("self_attention_residual.norm", "attn_ln"),
    ("attention_residual.norm", "attn_ln"),
    ("ffn_residual.norm", "mlp_ln"),
    ("cross_attention", "cross_attn"),
    ("self_attention", "attn"),
    (".attention", ".attn"),
    ("attn.output", "attn.out"),
    ("ffn.0", "mlp.0"),
    ("ffn.3", "mlp.2"),
    ("encoder.norm", "encoder.ln_post"),
    ("decoder.norm", "decoder.ln"),
    ("embedding", "token_embedding"),
)
# fields of ModelConfig and their names in Hugging Face's config.json
FIELDS = {
    "d_model": "d_model",
    "encoder_layers": "encoder_layers",
    "decoder_layers": "decoder_layers",
    "num_heads": "encoder_attention_heads",
    "ffn_dim": "encoder_ffn_dim",
    "max_positions": "max_target_positions",
}
WINDOW = 30.0  # seconds of audio that Whisper processes at once
ENCODER_POSITIONS = ("model.encoder.embed_positions.weight", "encoder.positional_embedding")  # HUGGING_FACE, OPENAI
OUTPUT, EMBEDDING = "decoder.output.weight", "decoder.embedding.weight"  # the same matrix


class WhisperTask(NamedTuple):
    """The task that a Whisper model is imported for; for Speech2Text only the language matters, that of its text."""

    language: str = "en"  # of the speech, as a multilingual model is told
    task: str = "transcribe"  # or translate, into English
    timestamps: bool = False  # whether the model writes timestamps, too
    window: float = WINDOW  # seconds that audio is padded to: 30 in Whisper's training, less is faster

    @property
    def normalizer(self) -> str:
        """The normaliser of the text that the model writes."""
        return "english" if self.language == "en" or self.task == "translate" else "neutral"


def import_model(
    source: str | Path, vocabulary: str | Path | None = None, wanted: WhisperTask | None = None
) -> SpeechModel:
    """The model in an OpenAI `.pt` file, or in a Hugging Face folder of Whisper or Speech2Text.

    `vocabulary` is the file of Whisper's tokens, `.tiktoken` or `vocab.json`, by default the one next to the weights.
    `wanted` None: English, with the window of its training. Raises ModelError with the reason."""
    source, wanted = Path(source), wanted or WhisperTask()
    try:
        if source.is_dir():
            return _from_hugging_face(source, vocabulary, wanted)
        return _from_openai(source, vocabulary, wanted)
    except FileNotFoundError as error:
        there = f"{error.filename or WEIGHTS} is missing" if source.exists() else "no such file or folder"
        raise ModelError(f"{source}: {there}") from None
    except pickle.UnpicklingError:  # torch's own message advises unsafe loading
        raise ModelError(f"{source}: cannot be imported (not a checkpoint of weights alone)") from None
    except ModelError:
        raise
    except (OSError, *UNREADABLE) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if isinstance(error, KeyError):
            reason = f"{reason} is missing"
        raise ModelError(f"{source}: cannot be imported ({reason.splitlines()[0]})") from None


def export_model(model: SpeechModel, folder: str | Path) -> None:
    """Writes an imported model as a Hugging Face folder: `config.json` and `model.safetensors`, and the vocabulary.

    Raises ModelError for a model that does not have the form of Whisper or Speech2Text."""
    config, folder = model.transformer.config, Path(folder)
    is_whisper = config.subsampler == "conv1d"
    positions = (config.positions, config.positions_of_decoder)
    if (
        config.subsampler not in ("conv1d", "conv1d_glu")
        or config.encoder != "transformer"
        or positions != ("sinusoidal_halves", "learned" if is_whisper else "sinusoidal_halves")
        or not config.norm_first
        or not config.tie_output
        or config.output_bias
        or config.key_bias == is_whisper
        or (config.d_k, config.d_v, config.attention_window) != (None, None, None)
        or model.front_end.config.kind != ("whisper" if is_whisper else "kaldi")
        or config.ctc
    ):
        raise ModelError("only models in the form of Whisper or Speech2Text can be exported")
    folder.mkdir(parents=True, exist_ok=True)
    table = HUGGING_FACE if is_whisper else SPEECH2TEXT
    weights = {
        _renamed(name, table): weight.float().contiguous()
        for name, weight in model.transformer.state_dict().items()
        if name != OUTPUT
    }
    if is_whisper:
        weights[ENCODER_POSITIONS[0]] = sinusoids_in_halves(_memory_frames(model), config.d_model)
    write_tensors(weights, folder / WEIGHTS)
    write_json((_whisper_description if is_whisper else _speech2text_description)(model), folder / CONFIG)
    save_tokenizer(model.tokenizer, folder)


def _renamed(name: str, table: Renaming) -> str:
    for ours, theirs in table:
        name = name.replace(ours, theirs)
    return name


def _built(
    features: FeatureConfig,
    config: ModelConfig,
    tokenizer: Tokenizer,
    weights: dict[str, Tensor],
    renaming: Renaming,
    normalizer: str,
) -> SpeechModel:
    """The model with the imported weights. Raises ValueError for a missing weight, a wrong shape or wrong sinusoids."""
    with WithoutStartValues():
        transformer = Transformer(config)
    state = {}
    for name, parameter in transformer.state_dict().items():
        theirs = _renamed(EMBEDDING if name == OUTPUT else name, renaming)
        if theirs not in weights:
            raise ValueError(f"{theirs} is missing")
        if weights[theirs].shape != parameter.shape:
            raise ValueError(f"{theirs} is {tuple(weights[theirs].shape)}, not {tuple(parameter.shape)}")
        state[name] = weights[theirs].float()
    transformer.load_state_dict(state)
    for name in ENCODER_POSITIONS:
        positions = weights.get(name)
        if positions is None:
            continue
        if not torch.allclose(positions.float(), sinusoids_in_halves(*positions.shape), atol=1e-2):
            raise ValueError(f"{name} does not hold sinusoids")
    return SpeechModel(features, transformer, tokenizer, normalizer).float().eval()  # whatever torch's default type is


def _from_openai(source: Path, vocabulary: str | Path | None, wanted: WhisperTask) -> SpeechModel:
    checkpoint = torch.load(source, map_location="cpu", weights_only=True)
    dims, weights = checkpoint["dims"], checkpoint["model_state_dict"]
    if (dims["n_audio_state"], dims["n_audio_head"]) != (dims["n_text_state"], dims["n_text_head"]):
        raise ValueError("its encoder and decoder have different widths")
    if vocabulary is None:
        name = "gpt2.tiktoken" if dims["n_vocab"] == 51864 else "multilingual.tiktoken"
        vocabulary = source.parent / name
    tokenizer = WhisperTokenizer.from_file(vocabulary, dims["n_vocab"])
    shape = {
        "input_dim": dims["n_mels"],
        "d_model": dims["n_audio_state"],
        "encoder_layers": dims["n_audio_layer"],
        "decoder_layers": dims["n_text_layer"],
        "num_heads": dims["n_audio_head"],
        "ffn_dim": 4 * dims["n_audio_state"],
        "max_positions": dims["n_text_ctx"],
    }
    weights = {**weights, "decoder.positions.table.weight": weights["decoder.positional_embedding"]}
    return _whisper(shape, tokenizer, weights, OPENAI, wanted)


def _whisper(
    shape: dict[str, Any],
    tokenizer: WhisperTokenizer,
    weights: dict[str, Tensor],
    renaming: Renaming,
    wanted: WhisperTask,
) -> SpeechModel:
    if not 0 < wanted.window <= WINDOW:
        raise ValueError(f"the window must be more than 0 and at most {WINDOW:.0f} s, not {wanted.window}")
    features = FeatureConfig("whisper", dim=shape["input_dim"], pad_seconds=wanted.window)
    return _built(features, _whisper_config(shape, tokenizer, wanted), tokenizer, weights, renaming, wanted.normalizer)


def _whisper_config(shape: dict[str, Any], tokenizer: WhisperTokenizer, wanted: WhisperTask) -> ModelConfig:
    return ModelConfig(
        vocab_size=len(tokenizer),
        activation="gelu",
        key_bias=False,
        positions="sinusoidal_halves",
        decoder_positions="learned",
        scale_embedding=False,
        output_bias=False,
        ctc=False,
        prompt=tuple(tokenizer.prompt(wanted.language, wanted.task, wanted.timestamps)),
        eos=tokenizer.eos,
        suppressed=tuple(tokenizer.suppressed(wanted.timestamps)),
        suppressed_first=tuple(tokenizer.suppressed_first()),
        first_timestamp=tokenizer.first_timestamp if wanted.timestamps else None,
        subsampler="conv1d",
        subsampling=2,
        dropout=0.0,
        **shape,
    )


def _from_hugging_face(source: Path, vocabulary: str | Path | None, wanted: WhisperTask) -> SpeechModel:
    described = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    weights = load_file(source / WEIGHTS)
    kind = described.get("model_type")
    if kind not in ("whisper", "speech_to_text"):
        raise ValueError(f"model_type {kind!r} is neither whisper nor speech_to_text")
    same = (("encoder_attention_heads", "decoder_attention_heads"), ("encoder_ffn_dim", "decoder_ffn_dim"))
    for ours, theirs in same:
        if described[ours] != described[theirs]:
            raise ValueError(f"{ours} and {theirs} differ")
    shape = {ours: described[theirs] for ours, theirs in FIELDS.items()}
    if kind == "whisper":
        tokenizer = _whisper_tokenizer(source, vocabulary, described["vocab_size"])
        shape["input_dim"] = described["num_mel_bins"]
        return _whisper(shape, tokenizer, weights, HUGGING_FACE, wanted)
    if wanted._replace(language="en") != WhisperTask() or vocabulary is not None:
        raise ValueError("task, timestamps, window and vocabulary are for Whisper, not for Speech2Text")
    tokenizer = Speech2TextTokenizer.load(source)
    config = ModelConfig(
        vocab_size=described["vocab_size"],
        input_dim=described["input_feat_per_channel"] * described["input_channels"],
        activation=described["activation_function"],
        positions="sinusoidal_halves",
        first_position=described["pad_token_id"] + 1,
        scale_embedding=described["scale_embedding"],
        output_bias=False,
        ctc=False,
        prompt=(described["decoder_start_token_id"],),
        eos=described["eos_token_id"],
        suppressed=(described["bos_token_id"], described["pad_token_id"]),
        subsampler="conv1d_glu",
        subsampling=4,
        subsampling_channels=described["conv_channels"],
        dropout=0.0,
        **shape,
    )
    features = FeatureConfig("kaldi", dim=config.input_dim, normalization="cmvn")
    return _built(features, config, tokenizer, weights, SPEECH2TEXT, wanted.normalizer)


def _whisper_tokenizer(source: Path, vocabulary: str | Path | None, vocab_size: int) -> WhisperTokenizer:
    if vocabulary is None and (source / WhisperTokenizer.file_name).is_file():
        return WhisperTokenizer.load(source)
    return WhisperTokenizer.from_file(vocabulary or source / "vocab.json", vocab_size)


def _shape(config: ModelConfig) -> dict[str, Any]:
    return {
        **{theirs: getattr(config, ours) for ours, theirs in FIELDS.items()},
        "vocab_size": config.vocab_size,
        "decoder_attention_heads": config.num_heads,
        "decoder_ffn_dim": config.ffn_dim,
        "activation_function": config.activation,
        "scale_embedding": config.scale_embedding,
        "decoder_start_token_id": config.prompt[0],
        "eos_token_id": config.eos,
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
    }


def _memory_frames(model: SpeechModel) -> int:
    """Encoder frames in Whisper's full window, whatever the model's window is: Whisper's own software pads to it."""
    return round(WINDOW * model.front_end.config.frames_per_second) // model.transformer.config.subsampling


def _whisper_description(model: SpeechModel) -> dict[str, Any]:
    config = model.transformer.config
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "num_mel_bins": config.input_dim,
        "max_source_positions": _memory_frames(model),
        **_shape(config),
        "bos_token_id": config.eos,
        "pad_token_id": config.eos,
    }


def _speech2text_description(model: SpeechModel) -> dict[str, Any]:
    config = model.transformer.config
    bos, pad = config.suppressed
    return {
        "model_type": "speech_to_text",
        "architectures": ["Speech2TextForConditionalGeneration"],
        "input_feat_per_channel": config.input_dim,
        "input_channels": 1,
        "conv_channels": config.subsampling_channels,
        "conv_kernel_sizes": [5, 5],
        "num_conv_layers": 2,
        "max_source_positions": 6000,
        **_shape(config),
        "bos_token_id": bos,
        "pad_token_id": pad,
    }
