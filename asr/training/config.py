"""The configuration of a training: plain dataclasses that Hydra composes, validated when they are built."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from asr.audio.config import DistortionConfig, FeatureConfig, SpecAugmentConfig
from asr.decode.options import DecodeOptions
from asr.model.config import WEIGHT_TYPES, MaskedPredictionConfig, ModelConfig
from asr.text.normalizer import get_normalizer

PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed")  # Lightning's names


NEARLY = 0.05  # share of a batch below which no further batch is made
OF_THE_REST = ("vocab_size", "input_dim")  # fields of a model that follow from its tokenizer and its features


def _check_choice(option: str, chosen: str, choices: tuple[str, ...]) -> None:
    if chosen not in choices:
        raise ValueError(f"{option}: {chosen!r} is not one of {', '.join(choices)}")


@dataclass
class SoundConfig:
    """Where the audio is and which of it is used."""

    train: list[str] = field(default_factory=list)  # corpora, in any form that asr.corpus opens
    dev: list[str] = field(default_factory=list)
    min_seconds: float = 0.1
    max_seconds: float = 30.0  # longer utterances are left out of training
    speeds: list[float] = field(default_factory=lambda: [0.9, 1.0, 1.1])  # one is drawn for each batch
    rirs: list[str] = field(default_factory=list)  # room impulse responses, as corpora in any form
    rir_prob: float = 0.0  # share of the training utterances that are convolved with one
    noises: list[str] = field(default_factory=list)  # recorded noise, as corpora in any form
    noise_prob: float = 0.0  # share of the training utterances that it is added to
    snr: list[float] = field(default_factory=lambda: [5.0, 25.0])  # signal-to-noise ratio in dB, lowest and highest
    codec: float = 0.0  # share of the training utterances that pass through MP3 at 16 to 40 kbit/s
    batch_seconds: float = 120.0  # of audio on a device at a time, with padding; less where an update is split equally
    global_batch_seconds: float = 120.0  # of audio in one update, over all devices
    workers: int = -1  # processes that read audio; -1: one per core, 1 to 8; devices share the cores

    def __post_init__(self):
        if not self.train or not self.dev:
            raise ValueError("data.train and data.dev must each name at least one corpus")
        if not 0 <= self.min_seconds < self.max_seconds:
            raise ValueError("data.min_seconds must be at least 0 and less than data.max_seconds")
        if self.batch_seconds < self.max_seconds:
            raise ValueError(
                "data.batch_seconds must be at least data.max_seconds, or the longest utterance has no batch"
            )
        if self.workers < -1:
            raise ValueError(f"data.workers must be a number of processes, or -1, not {self.workers}")
        if not self.batch_seconds <= self.global_batch_seconds < math.inf:
            raise ValueError("data.global_batch_seconds must be finite and at least data.batch_seconds")
        if not self.speeds or any(not 0.5 <= speed <= 2 for speed in self.speeds):
            raise ValueError("data.speeds must lie between 0.5 and 2; [1.0] for none")
        for name in ("rir_prob", "noise_prob", "codec"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"data.{name} must be a probability, not {getattr(self, name)}")
        for corpora, name in ((self.rirs, "rir"), (self.noises, "noise")):
            if bool(corpora) != bool(getattr(self, f"{name}_prob")):
                raise ValueError(f"data.{name}s and data.{name}_prob: both, or neither")
        if len(self.snr) != 2 or self.snr[0] > self.snr[1]:
            raise ValueError(f"data.snr must be the lowest and the highest signal-to-noise ratio in dB, not {self.snr}")

    def shared_by(self, devices: int) -> tuple[int, float]:
        """How many batches per device make an update, and the seconds of audio in each: between `max_seconds` and
        `batch_seconds`, so that all of them together have about `global_batch_seconds`."""
        whole = self.global_batch_seconds / devices  # of each device
        most = max(1, math.ceil(whole / self.batch_seconds - NEARLY))
        ways = [
            (count, min(self.batch_seconds, max(self.max_seconds, whole / count))) for count in (most, max(1, most - 1))
        ]
        return min(ways, key=lambda way: abs(way[0] * way[1] - whole))


@dataclass
class DataConfig(SoundConfig):
    """Where the speech and its transcripts are."""

    normalizer: str = "auto"  # english, neutral, none, or auto: that of the model whose tokenizer is kept, else english

    def __post_init__(self):
        get_normalizer(self.normalizer_name)
        super().__post_init__()

    @property
    def normalizer_name(self) -> str:
        """`auto` is english where no model says otherwise."""
        return "english" if self.normalizer == "auto" else self.normalizer


@dataclass
class TokenizerConfig:
    kind: str = "char"  # char, or subwords: bpe or unigram
    vocab_size: int = 500  # number of subwords, four special symbols included
    folder: str = ""  # model folder whose tokenizer (and normaliser) is used instead of training one

    def __post_init__(self):
        _check_choice("tokenizer.kind", self.kind, ("char", "bpe", "unigram"))


@dataclass
class LossConfig:
    """ctc_weight · CTC + (1 - ctc_weight) · cross-entropy of the decoder."""

    ctc_weight: float = 0.4
    intermediate_ctc: int = 3  # encoder layers below the last, evenly spaced, that also have a CTC loss
    intermediate_weight: float = 0.5  # their share of the CTC loss
    # each batch is seen twice, under different SpecAugment masks, and this weight times the divergence between the CTC
    # posteriors of both is added to the CTC loss; 0: seen once. 0.2 in the literature, with half the epochs
    consistency: float = 0.0
    # minimum word error rate training: this weight times the expected word errors of the `nbest` best hypotheses is
    # added; 0: none. For the last updates of a trained model, since each update then includes a beam search
    mwer: float = 0.0
    nbest: int = 4
    label_smoothing: float = 0.1

    def __post_init__(self):
        if not 0 <= self.ctc_weight <= 1 or not 0 <= self.label_smoothing < 1:
            raise ValueError("loss.ctc_weight must lie in [0, 1], loss.label_smoothing in [0, 1)")
        if self.consistency < 0 or (self.consistency and not self.ctc_weight):
            raise ValueError("loss.consistency must not be negative, and needs CTC: loss.ctc_weight must be positive")
        if self.mwer < 0 or self.nbest < 2:
            raise ValueError("loss.mwer must not be negative, loss.nbest at least 2")
        if self.intermediate_ctc < 0 or not 0 <= self.intermediate_weight < 1:
            raise ValueError("loss.intermediate_ctc must not be negative, loss.intermediate_weight must lie in [0, 1)")


@dataclass
class OptimizerConfig:
    """AdamW or Muon with warm-up; the rate rises linearly to `lr` and then falls."""

    kind: str = "adamw"  # adamw, or muon for the matrices of the layers and AdamW for the rest (asr.training.muon)
    lr: float = 1.5e-3  # at the end of the warm-up
    schedule: str = "cosine"  # cosine: to zero at the last update; inverse_sqrt: as in the paper
    warmup: float = 0.1  # updates; below 1: share of all updates
    betas: list[float] = field(default_factory=lambda: [0.9, 0.98])
    weight_decay: float = 0.01  # of matrices; not of biases and norms
    clip: float = 5.0  # maximum norm of the gradient

    def __post_init__(self):
        _check_choice("optimizer.kind", self.kind, ("adamw", "muon"))
        _check_choice("optimizer.schedule", self.schedule, ("cosine", "inverse_sqrt"))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must be two numbers in [0, 1), not {self.betas}")
        if self.weight_decay < 0:
            raise ValueError("optimizer.weight_decay must not be negative")
        if not 0 < self.lr < math.inf or not 0 <= self.warmup < math.inf or self.clip <= 0:
            raise ValueError(
                "optimizer.lr and optimizer.clip must be positive, lr and warmup finite, warmup not negative"
            )


@dataclass(kw_only=True)
class RunConfig:
    """How any training runs."""

    epochs: int = 40
    # type of the weights in the model folder: float32, float16 at half the size, or int8 at a quarter, with a scale per
    # row; the arithmetic of decoding is another matter (`--precision`)
    export: str = "float32"
    precision: str = "auto"  # one of PRECISIONS; auto: bf16-mixed where the hardware has it
    compile: bool = False  # compile the layers by torch.compile: for long trainings on a GPU; slower on a CPU
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    devices: int = 0  # processes on this machine, one per GPU; 0: one for each GPU, or one if there is none
    nodes: int = 1  # machines
    save_minutes: float = 10.0  # between two checkpoints within an epoch; at its end there always is one
    seed: int = 1
    out: str = "exp/model"  # checkpoints, TensorBoard and the model
    resume: bool = False  # continue from the last checkpoint in `out`

    def __post_init__(self):
        if self.epochs < 1 or self.nodes < 1:
            raise ValueError("epochs and nodes must be at least 1")
        if not self.out:
            raise ValueError("out must name a folder")
        if self.save_minutes < 0 or self.devices < 0:
            raise ValueError("save_minutes and devices must not be negative")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must lie in [0, 2^32), not {self.seed}")
        _check_choice("precision", self.precision, PRECISIONS)
        _check_choice("export", self.export, WEIGHT_TYPES)


@dataclass(kw_only=True)
class SoundRunConfig(RunConfig):
    """How a training on sound runs, on one device or many."""

    validate_every: int = 1  # epochs
    strategy: str = "auto"  # of several devices: ddp, or fsdp (each keeps a share of the weights); auto: ddp
    wandb: str = ""  # project of Weights & Biases that also gets the curves; empty: TensorBoard only

    def __post_init__(self):
        super().__post_init__()
        if self.validate_every < 1:
            raise ValueError("validate_every must be at least 1")
        _check_choice("strategy", self.strategy, ("auto", "ddp", "fsdp"))
        if self.optimizer.kind == "muon" and self.strategy == "fsdp":
            raise ValueError(
                "optimizer.kind=muon needs whole matrices, of which strategy=fsdp leaves each process a share"
            )


@dataclass(kw_only=True)
class TrainConfig(SoundRunConfig):
    """The whole training; `python -m asr.train --help` shows it composed."""

    data: DataConfig
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    features: FeatureConfig = field(default_factory=FeatureConfig)
    model: ModelConfig = field(default_factory=ModelConfig)  # vocab_size and input_dim follow from the rest
    # a model folder to start from, whose shape and features are kept; of `model` only dropout and the attention window
    # apply, and with new_tokenizer what belongs to the vocabulary. Or an encoder (asr.pretrain): then `model`
    # configures the decoder
    init_from: str = ""
    # folder of a language model (asr.train_lm) with the decoder's shape: its tokenizer and weights are used, only
    # attention to the encoder starts anew
    init_decoder_from: str = ""
    # with init_from: train a new one on the data; each of its tokens starts as the mean of the old ones that spell it
    new_tokenizer: bool = False
    origin_share: float = 0.0  # with init_from: the share of its weights in the exported model
    freeze_layers: int = 0  # with init_from: lowest encoder layers to freeze, with the subsampler below them
    add_layers: int = 0  # with init_from: encoder layers to insert, which at first change nothing
    # with init_from: its weights are frozen, and each linear layer within its layers learns a matrix of this rank that
    # is added to its own (LoRA, asr.model.lora); 0: the weights themselves are trained
    lora_rank: int = 0
    distortion: DistortionConfig = field(default_factory=DistortionConfig)
    spec_augment: SpecAugmentConfig = field(default_factory=SpecAugmentConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    validation: DecodeOptions = field(default_factory=lambda: DecodeOptions(beam_size=4))
    average: int = 10  # number of checkpoints, the best by dev WER, averaged into the model
    ema: float = 0.0  # decay per update of a moving average of the weights, validated and kept in their place; 0: none
    patience: int = 0  # validations without a better dev WER after which training stops; 0: never

    @property
    def averaged(self) -> int:
        """The number of best checkpoints that are kept and averaged: those of a moving average are means already."""
        return 1 if self.ema else self.average

    def __post_init__(self):
        super().__post_init__()
        for name in ("phrases", "lm_weight", "ilm_weight", "ngram_weight", "fallback"):
            if getattr(self.validation, name) != getattr(DecodeOptions(), name):
                raise ValueError(
                    f"validation.{name}: validation during training uses no other models, phrases or fallback"
                )
        if self.average < 1 or self.patience < 0:
            raise ValueError("average must be at least 1, patience at least 0")
        if self.ema and self.strategy == "fsdp":
            raise ValueError("ema keeps a copy of all weights, of which strategy=fsdp leaves each process a share")
        if self.loss.mwer and self.strategy == "fsdp":
            raise ValueError("loss.mwer decodes with all weights, of which strategy=fsdp leaves each process a share")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema must lie in [0, 1), not {self.ema}")
        if not 0 <= self.origin_share <= 1:
            raise ValueError(f"origin_share must lie in [0, 1], not {self.origin_share}")
        if min(self.freeze_layers, self.add_layers, self.lora_rank) < 0:
            raise ValueError("freeze_layers, add_layers and lora_rank must not be negative")
        if not self.init_from and (self.freeze_layers or self.add_layers or self.lora_rank or self.new_tokenizer):
            raise ValueError("freeze_layers, add_layers, lora_rank and new_tokenizer need init_from")
        if self.lora_rank and (self.add_layers or self.init_decoder_from):
            raise ValueError(
                "lora_rank freezes all weights: what add_layers and init_decoder_from start would not learn"
            )
        if self.lora_rank and self.optimizer.kind == "muon":
            raise ValueError("optimizer.kind=muon is for whole matrices: lora_rank goes with adamw")
        if self.origin_share and (not self.init_from or self.new_tokenizer):
            raise ValueError(
                f"origin_share={self.origin_share} needs init_from, and the tokenizer that came with it: origin_share=0"
                " does without"
            )
        if self.init_decoder_from and (self.new_tokenizer or self.origin_share):
            raise ValueError(
                f"init_decoder_from brings a tokenizer: new_tokenizer={str(self.new_tokenizer).lower()} and"
                f" origin_share={self.origin_share} do not go with it (false, and 0)"
            )


@dataclass(kw_only=True)
class PretrainConfig(SoundRunConfig):
    """The training of an encoder without transcripts; `python -m asr.pretrain --cfg job` shows it composed."""

    data: SoundConfig
    features: FeatureConfig = field(default_factory=lambda: FeatureConfig(normalization="utterance"))
    model: ModelConfig = field(default_factory=ModelConfig)  # only its encoder; input_dim follows from the features
    masked_prediction: MaskedPredictionConfig = field(default_factory=MaskedPredictionConfig)
    out: str = "exp/encoder"  # checkpoints, TensorBoard and the encoder


@dataclass
class TextConfig:
    """Text, one sentence per line: plain files, or compressed by gzip or xz."""

    train: list[str] = field(default_factory=list)
    # the probability that a line is joined to the next, as in utterances of people who read several sentences
    joined: float = 0.0
    transcripts: list[str] = field(default_factory=list)  # corpora whose transcripts are read; twice if named twice
    dev: list[str] = field(default_factory=list)  # empty: some lines of the training text
    held_out: int = 0  # how many lines, before any are joined; 0: 2000, but at most a tenth (ten, of few lines)
    batch_tokens: int = 8192  # in one update, padding included
    max_tokens: int = 200  # longer lines are left out

    def __post_init__(self):
        if not self.train:
            raise ValueError("data.train must name at least one text")
        if not 0 <= self.joined < 1:
            raise ValueError("data.joined must lie in [0, 1)")
        if self.held_out < 0 or self.max_tokens < 2 or self.batch_tokens < self.max_tokens:
            raise ValueError("data.held_out must be at least 0, data.max_tokens 2, data.batch_tokens data.max_tokens")


def _language_model() -> ModelConfig:
    # wide rather than deep: it runs at every step of the search, where each layer costs time whatever its width;
    # no dropout: one or two passes over a large text do not overfit
    return ModelConfig(d_model=384, num_heads=6, decoder_layers=2, ffn_dim=1024, activation="gelu", dropout=0.0)


@dataclass(kw_only=True)
class LMTrainConfig(RunConfig):
    """The training of a language model; `python -m asr.train_lm --cfg job` shows it composed."""

    data: TextConfig
    tokenizer: str = "???"  # model folder of the recogniser, whose tokenizer and normaliser are used
    # folder of a language model to start from, whose shape is kept; of `model` only dropout applies. If its tokenizer
    # is another, each token starts as the mean of the old ones that spell it
    init_from: str = ""
    add_layers: int = 0  # with init_from: layers to insert, which at first change nothing
    model: ModelConfig = field(default_factory=_language_model)  # its depth is decoder_layers; vocab_size follows
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=2e-3, warmup=300, clip=1.0))
    label_smoothing: float = 0.0
    epochs: int = 2
    out: str = "exp/lm"

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.label_smoothing < 1:
            raise ValueError("label_smoothing must lie in [0, 1)")
        if self.add_layers < 0 or (self.add_layers and not self.init_from):
            raise ValueError("add_layers must not be negative, and needs init_from")
        if self.model.attention_window:
            raise ValueError("model.attention_left and model.attention_right are for an encoder")
