"""What a training is: plain dataclasses that Hydra composes, checked when they are built."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from asr.audio.augment import SpecAugmentConfig
from asr.audio.distort import DistortionConfig
from asr.audio.features import FeatureConfig
from asr.decode.options import DecodeOptions
from asr.model.best_rq import MaskedPredictionConfig
from asr.model.config import ModelConfig
from asr.model.folder import DTYPES
from asr.text.normalizer import get_normalizer

PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed")  # Lightning's names


NEARLY = 0.05  # of a batch: for less no batch is split
OF_THE_REST = ("vocab_size", "input_dim")  # of a model: what its tokenizer and its features say


def _check_choice(option: str, chosen: str, choices: tuple[str, ...]) -> None:
    if chosen not in choices:
        raise ValueError(f"{option}: {chosen!r} is not one of {', '.join(choices)}")


@dataclass
class SoundConfig:
    """Where the sound is and what of it is used."""

    train: list[str] = field(default_factory=list)  # corpora, in any form that asr.corpus opens
    dev: list[str] = field(default_factory=list)
    min_seconds: float = 0.1
    max_seconds: float = 30.0  # longer utterances are left out of training
    speeds: list[float] = field(default_factory=lambda: [0.9, 1.0, 1.1])  # one is drawn for each batch of sound
    rirs: list[str] = field(default_factory=list)  # rooms' impulse responses, corpora in any form
    rir_prob: float = 0.0  # how often an utterance of the training is put into one of these rooms
    noises: list[str] = field(default_factory=list)  # recorded noise, corpora in any form
    noise_prob: float = 0.0  # how often an utterance of the training has some of it beneath
    snr: list[float] = field(default_factory=lambda: [5.0, 25.0])  # decibels that the noise lies below, from and to
    codec: float = 0.0  # how often an utterance of the training has been through MP3 at 16 to 40 kbit/s: a probability
    batch_seconds: float = 120.0  # of sound on one device at once, padding included; less where that divides an update
    global_batch_seconds: float = 120.0  # of sound in one update, over all devices
    workers: int = -1  # processes that read sound; -1: one for each core, 1 to 8; devices share the cores

    def __post_init__(self):
        if not self.train or not self.dev:
            raise ValueError("data.train and data.dev each name at least one corpus")
        if not 0 <= self.min_seconds < self.max_seconds:
            raise ValueError("data.min_seconds must be at least 0 and less than data.max_seconds")
        if self.batch_seconds < self.max_seconds:
            raise ValueError(
                "data.batch_seconds must be at least data.max_seconds, or the longest utterance has no batch"
            )
        if self.workers < -1:
            raise ValueError(f"data.workers is a number of processes, or -1, not {self.workers}")
        if self.global_batch_seconds < self.batch_seconds:
            raise ValueError("data.global_batch_seconds must be at least data.batch_seconds")
        if not self.speeds or any(not 0.5 <= speed <= 2 for speed in self.speeds):
            raise ValueError("data.speeds lie between 0.5 and 2; [1.0] for none")
        for name in ("rir_prob", "noise_prob", "codec"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"data.{name} is a probability, not {getattr(self, name)}")
        for corpora, name in ((self.rirs, "rir"), (self.noises, "noise")):
            if bool(corpora) != bool(getattr(self, f"{name}_prob")):
                raise ValueError(f"data.{name}s says which, data.{name}_prob how often: both, or neither")
        if len(self.snr) != 2 or self.snr[0] > self.snr[1]:
            raise ValueError(f"data.snr are the lowest and the highest number of decibels, not {self.snr}")

    def shared_by(self, devices: int) -> tuple[int, float]:
        """How many batches of each of so many devices make an update, and the seconds of sound in each: between
        `max_seconds` and `batch_seconds`, so that all of them together have about `global_batch_seconds`."""
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
    vocab_size: int = 500  # of subwords, four special symbols included
    folder: str = ""  # of a model whose tokenizer is taken (and its normaliser), instead of one of these transcripts

    def __post_init__(self):
        _check_choice("tokenizer.kind", self.kind, ("char", "bpe", "unigram"))


@dataclass
class LossConfig:
    """ctc_weight · CTC + (1 - ctc_weight) · cross-entropy of the decoder."""

    ctc_weight: float = 0.4
    intermediate_ctc: int = 3  # encoder layers below the last, evenly spaced, that predict by CTC too
    intermediate_weight: float = 0.5  # their share of the CTC loss
    # each batch is seen twice, under different SpecAugment masks: this weight times the divergence between what CTC
    # says of both joins CTC's loss; 0: seen once. 0.2 in the literature, with half the epochs
    consistency: float = 0.0
    # minimum word error rate training: this weight times the word errors expected of the `nbest` best hypotheses is
    # added; 0: none. For the last updates of a trained model, each of which then has a beam search in it
    mwer: float = 0.0
    nbest: int = 4
    label_smoothing: float = 0.1

    def __post_init__(self):
        if not 0 <= self.ctc_weight <= 1 or not 0 <= self.label_smoothing < 1:
            raise ValueError("loss.ctc_weight must lie in [0, 1], loss.label_smoothing in [0, 1)")
        if self.consistency < 0 or (self.consistency and not self.ctc_weight):
            raise ValueError("loss.consistency must not be negative, and is of CTC: loss.ctc_weight must be positive")
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
    warmup: float = 0.1  # updates; below 1: as a part of all updates
    betas: list[float] = field(default_factory=lambda: [0.9, 0.98])
    weight_decay: float = 0.01  # of matrices; biases and norms have none
    clip: float = 5.0  # largest norm of the gradient

    def __post_init__(self):
        _check_choice("optimizer.kind", self.kind, ("adamw", "muon"))
        _check_choice("optimizer.schedule", self.schedule, ("cosine", "inverse_sqrt"))
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas are two numbers in [0, 1), not {self.betas}")
        if self.weight_decay < 0:
            raise ValueError("optimizer.weight_decay must not be negative")
        if not 0 < self.lr < math.inf or self.warmup < 0 or self.clip <= 0:
            raise ValueError(
                "optimizer.lr and optimizer.clip must be positive, lr finite, optimizer.warmup not negative"
            )


@dataclass(kw_only=True)
class RunConfig:
    """How a training runs, whatever it trains."""

    epochs: int = 40
    # type of the weights in the model folder: float32, float16 at half the size, or int8 at a quarter, with a scale for
    # each row; they are computed with in another (`--precision`)
    export: str = "float32"
    precision: str = "auto"  # one of PRECISIONS; auto: bf16-mixed where the hardware has it
    compile: bool = False  # the layers, by torch.compile: for long trainings on a GPU; a CPU is slower with it
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    devices: int = 0  # processes on this machine, one a GPU; 0: one for each GPU, or one where there is none
    nodes: int = 1  # machines
    save_minutes: float = 10.0  # between two saves within an epoch; at its end there is one in any case
    seed: int = 1
    out: str = "exp/model"  # checkpoints, TensorBoard and the model
    resume: bool = False  # go on from the last checkpoint in `out`

    def __post_init__(self):
        if self.epochs < 1 or self.nodes < 1:
            raise ValueError("epochs and nodes must be at least 1")
        if not self.out:
            raise ValueError("out names a folder")
        if self.save_minutes < 0 or self.devices < 0:
            raise ValueError("save_minutes and devices must not be negative")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed must lie in [0, 2^32), not {self.seed}")
        _check_choice("precision", self.precision, PRECISIONS)
        _check_choice("export", self.export, tuple(DTYPES))


@dataclass(kw_only=True)
class SoundRunConfig(RunConfig):
    """How a training on sound runs, on one device or many."""

    validate_every: int = 1  # epochs
    strategy: str = "auto"  # how they work together: ddp, or fsdp (each keeps a share of the weights); auto: ddp
    wandb: str = ""  # project of Weights & Biases that gets the curves, too; none: TensorBoard alone

    def __post_init__(self):
        super().__post_init__()
        if self.validate_every < 1:
            raise ValueError("validate_every must be at least 1")
        _check_choice("strategy", self.strategy, ("auto", "ddp", "fsdp"))
        if self.optimizer.kind == "muon" and self.strategy == "fsdp":
            raise ValueError(
                "optimizer.kind=muon takes whole matrices, of which strategy=fsdp leaves each process a share"
            )


@dataclass(kw_only=True)
class TrainConfig(SoundRunConfig):
    """The whole training; `python -m asr.train --help` shows it composed."""

    data: DataConfig
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    features: FeatureConfig = field(default_factory=FeatureConfig)
    model: ModelConfig = field(default_factory=ModelConfig)  # vocab_size and input_dim follow from the rest
    # a model folder to go on from, with its shape and features; of `model` dropout and the attention's window count,
    # and with new_tokenizer what belongs to a vocabulary. Or an encoder (asr.pretrain): then `model` says what the
    # decoder is
    init_from: str = ""
    # a language model's folder (asr.train_lm) of the decoder's shape: its tokenizer and its weights, attention to the
    # encoder begins anew
    init_decoder_from: str = ""
    # with init_from: train one on the data; each of its tokens begins as the mean of those that wrote it before
    new_tokenizer: bool = False
    origin_share: float = 0.0  # with init_from: its weights' share in the model that is exported
    freeze_layers: int = 0  # with init_from: encoder layers that stay as they are, and the subsampler below them
    add_layers: int = 0  # with init_from: encoder layers put between those that are there; at first they change nothing
    # with init_from: its weights stay as they are, and each linear layer within its layers learns what is added to its
    # own, a matrix of this rank (LoRA, asr.model.lora); 0: the weights themselves are trained
    lora_rank: int = 0
    distortion: DistortionConfig = field(default_factory=DistortionConfig)
    spec_augment: SpecAugmentConfig = field(default_factory=SpecAugmentConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    validation: DecodeOptions = field(default_factory=lambda: DecodeOptions(beam_size=4))
    average: int = 10  # checkpoints, the best by dev WER, averaged into the model
    ema: float = 0.0  # decay per update of a running mean of the weights, which is validated and kept instead; 0: none
    patience: int = 0  # validations without a better dev WER after which training stops; 0: never

    def __post_init__(self):
        super().__post_init__()
        for name in ("phrases", "lm_weight", "ilm_weight", "ngram_weight", "fallback"):
            if getattr(self.validation, name) != getattr(DecodeOptions(), name):
                raise ValueError(
                    f"validation.{name}: a training is validated without other models, phrases or fallback"
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
            raise ValueError("lora_rank keeps all weights: what add_layers and init_decoder_from begin would not learn")
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
    model: ModelConfig = field(default_factory=ModelConfig)  # of it the encoder; input_dim follows from the features
    masked_prediction: MaskedPredictionConfig = field(default_factory=MaskedPredictionConfig)
    out: str = "exp/encoder"  # checkpoints, TensorBoard and the encoder


@dataclass
class TextConfig:
    """Text, one sentence a line: files as they are, or packed by gzip or xz."""

    train: list[str] = field(default_factory=list)
    # the chance that a line goes on with the next, as the utterances of people who read several sentences do
    joined: float = 0.0
    transcripts: list[str] = field(default_factory=list)  # corpora to read the transcripts of; twice, if named twice
    dev: list[str] = field(default_factory=list)  # none: some lines of the training text
    held_out: int = 2000  # how many, before any are joined
    batch_tokens: int = 8192  # in one update, padding included
    max_tokens: int = 200  # longer lines are left out

    def __post_init__(self):
        if not self.train:
            raise ValueError("data.train names at least one text")
        if not 0 <= self.joined < 1:
            raise ValueError("data.joined must lie in [0, 1)")
        if self.held_out < 1 or self.max_tokens < 2 or self.batch_tokens < self.max_tokens:
            raise ValueError("data.held_out must be at least 1, data.max_tokens 2, data.batch_tokens data.max_tokens")


def _language_model() -> ModelConfig:
    # wide rather than deep: the search asks it at every step, where each layer costs time whatever its width;
    # no dropout: one or two passes over a large text do not overfit
    return ModelConfig(d_model=384, num_heads=6, decoder_layers=2, ffn_dim=1024, activation="gelu", dropout=0.0)


@dataclass(kw_only=True)
class LMTrainConfig(RunConfig):
    """The training of a language model; `python -m asr.train_lm --cfg job` shows it composed."""

    data: TextConfig
    tokenizer: str = "???"  # model folder of the recogniser: its tokenizer and normaliser are the language model's
    # a language model's folder to go on from, with its shape; of `model` dropout alone counts. Where it has another
    # tokenizer, each token begins as the mean of those that wrote it there
    init_from: str = ""
    add_layers: int = 0  # with init_from: layers put between those that are there; at first they change nothing
    model: ModelConfig = field(default_factory=_language_model)  # of it the decoder's depth; vocab_size follows
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
            raise ValueError("model.attention_left and model.attention_right are an encoder's")
