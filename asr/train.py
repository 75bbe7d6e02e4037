"""Training.

    python -m asr.train                                         the tour: spoken digits, a few minutes on a CPU
    python -m asr.train experiment=an4 data.train=[...]         a shipped experiment on your data
    python -m asr.train model=conformer-s epochs=60 out=exp/a   any option of asr/training/config.py
    python -m asr.train out=exp/a resume=true                   goes on where the last checkpoint is

Options are Hydra's: `python -m asr.train --help` lists them all, `--cfg job` shows them composed.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from asr.commands import fail
from asr.model.config import PRESETS
from asr.resources import resource
from asr.training.config import TrainConfig

OPTIONS = "config.yaml"  # in the folder of a training: the options that it was started with


def register() -> None:
    """Tells Hydra the schema, so that types are checked, the model presets as the group `model`, and how to find what
    ships with the project (`${shipped:data/digits/train.tar}`)."""
    OmegaConf.register_new_resolver("shipped", lambda path: str(resource(*path.split("/"))), replace=True)
    store = ConfigStore.instance()
    store.store(name="schema", node=_writable(TrainConfig))
    for name, preset in PRESETS.items():
        store.store(group="model", name=name, node=_writable(preset))


def build_config(composed: DictConfig) -> TrainConfig:
    """The composed options as checked dataclasses. Raises ValueError naming the option that is wrong."""
    try:
        return OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {str(error).splitlines()[0]}") from None


def _writable(config: object) -> DictConfig:
    node = OmegaConf.structured(config)
    OmegaConf.set_readonly(node, False)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            OmegaConf.set_readonly(child, False)
    return node


def with_saved_options(composed: DictConfig, typed: Sequence[str]) -> DictConfig:
    """The options that the training in `composed.out` was started with, and over them what was `typed` this time.

    Raises ValueError where no training is there to resume."""
    saved = Path(composed.out) / OPTIONS
    if not saved.is_file():
        raise ValueError(f"resume=true: no training was started in out={composed.out}")
    fields = [word for word in typed if word.split("=")[0] not in ("model", "experiment")]
    return OmegaConf.merge(_writable(TrainConfig), OmegaConf.load(saved), OmegaConf.from_dotlist(fields))


def run(composed: DictConfig) -> None:
    from asr.training.run import train

    logging.basicConfig(level=logging.INFO, format="%(message)s", force=True)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    try:
        if composed.resume:
            composed = with_saved_options(composed, HydraConfig.get().overrides.task)
        config = build_config(composed)
        Path(config.out).mkdir(parents=True, exist_ok=True)
        if not (Path(config.out) / "checkpoints" / "last.ckpt").exists():
            OmegaConf.save(composed, Path(config.out) / OPTIONS, resolve=True)
        train(config)
    except (ValueError, FileExistsError, OmegaConfBaseException) as error:
        fail("asr.train", error)


def main() -> None:
    register()
    hydra.main(version_base="1.3", config_path=str(resource("conf")), config_name="train")(run)()


if __name__ == "__main__":
    main()
