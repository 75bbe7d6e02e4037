"""A corpus made on the spot, in which words are tones, one pitch for each word; and options to train on it."""

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from asr.audio.reading import SAMPLE_RATE
from asr.composition import build_config, register
from asr.resources import resource
from asr.training.config import TrainConfig

WORDS = {"low": 300.0, "mid": 900.0, "high": 2700.0}


def write_corpus(folder: Path, utterances: int, seed: int) -> Path:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for i in range(utterances):
        words = rng.choice(list(WORDS), rng.integers(1, 4))
        t = np.arange(round(0.3 * SAMPLE_RATE)) / SAMPLE_RATE
        gap = np.zeros(round(0.1 * SAMPLE_RATE))
        tones = [part for word in words for part in (0.3 * np.sin(2 * np.pi * WORDS[word] * t), gap)]
        sound = np.concatenate([gap, *tones]) + rng.normal(0, 0.003, round(0.1 * SAMPLE_RATE) + len(words) * 6400)
        soundfile.write(folder / f"{i}.wav", sound, SAMPLE_RATE)
        (folder / f"{i}.txt").write_text(" ".join(words).title() + ".")
    return folder


def write_sets(folder: Path, train: int, dev: int) -> Path:
    """Writes a corpus of so many utterances in the folders train and dev."""
    write_corpus(folder / "train", train, seed=1)
    write_corpus(folder / "dev", dev, seed=2)
    return folder


@cache
def _composed(name: str, files: tuple[str, ...] = ()) -> DictConfig:
    register()
    with initialize_config_dir(str(resource("conf")), version_base="1.3"):
        return compose(name, list(files))


@cache
def _parsed(word: str) -> Override:
    return OverridesParser.create().parse_override(word)


def composed(name: str, words: list[str]) -> DictConfig:
    """What Hydra composes of `conf/<name>.yaml` and options. Files are composed once, which takes 0.1 s, for each
    choice of model and experiment."""
    overrides = [_parsed(word) for word in words]
    files = tuple(each.input_line for each in overrides if each.key_or_group in ("model", "experiment"))
    config = deepcopy(_composed(name, files))
    for override in overrides:
        if override.input_line not in files:
            OmegaConf.update(config, override.key_or_group, override.value())
    return config


def compose_options(name: str, corpus: Path, out: Path, settings: list[str]) -> Any:
    """The options of `conf/<name>.yaml` for a corpus with the folders train and dev."""
    limits = [f"data.{limit}=10" for limit in ("batch_seconds", "global_batch_seconds", "max_seconds")]
    data = [f"data.train=[{corpus / 'train'}]", f"data.dev=[{corpus / 'dev'}]", f"out={out}", "data.workers=0"]
    common = [*data, *limits, "optimizer.lr=5e-3", "precision=32-true"]
    return build_config(composed(name, [*common, *settings]))


def options(corpus: Path, out: Path, *overrides: str) -> TrainConfig:
    settings = [
        "model.d_model=32",
        "model.encoder_layers=2",
        "model.decoder_layers=1",
        "model.dropout=0",
        "model.subsampling_channels=8",
        "spec_augment.freq_width=5",
        "average=2",
    ]
    return compose_options("train", corpus, out, [*settings, *overrides])


def fitted(config: TrainConfig):
    """The data of a training from scratch, without what its model cannot learn from."""
    from asr.training.building import build_model, build_tokenizer  # heavy, and tones are for all tests
    from asr.training.data import SpeechData

    data = SpeechData(config.data, config.seed)
    data.fit_to(build_model(config, build_tokenizer(config.tokenizer, data.texts())))
    return data
