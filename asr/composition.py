"""Hydra for the training commands: typed options, errors that name the option, options saved with the checkpoints."""

from __future__ import annotations

import contextlib
import difflib
import errno
import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_type_hints

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from asr.commands import fail, give_up_output, replace_closed_outputs
from asr.files import replacing
from asr.heap import importing
from asr.model.config import PRESETS
from asr.resources import resource
from asr.training.config import OF_THE_REST, LMTrainConfig, PretrainConfig, TrainConfig

# in a training's folder: the options that it was started with, and the name of the experiment; the checkpoints hold the
# options that it resumes with
OPTIONS = "config.yaml"
# options that must not change when a training is resumed: they determine the shape of what is trained, or the optimiser
SHAPE = (
    "model.",
    "tokenizer",
    "features.",
    "masked_prediction.code",
    "new_tokenizer",
    "freeze_layers",
    "add_layers",
    "lora_rank",
    "optimizer.kind",
)
# files that may differ between models of one kind
VARYING = ("model.safetensors", "bigram.safetensors", "decoding.json", "README.md")
FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk, or the user's quota
FOLLOWING = {"model.vocab_size": "the tokenizer", "model.input_dim": "the features"}  # not set by the user
ORIGINS = ("tokenizer", "tokenizer.folder", "init_from", "init_decoder_from")  # folders, which may have moved


@cache
def register() -> None:
    """Registers with Hydra the schemas, so that types are checked, the model presets as the group `model`, and the
    resolver of files that ship with the project (`${shipped:data/digits/train.tar}`)."""
    OmegaConf.register_new_resolver("shipped", lambda path: str(resource(*path.split("/"))), replace=True)
    store = ConfigStore.instance()
    store.store(name="schema", node=_writable(TrainConfig))
    store.store(name="lm_schema", node=_writable(LMTrainConfig))
    store.store(name="pretrain_schema", node=_writable(PretrainConfig))
    for name, preset in PRESETS.items():
        store.store(group="model", name=name, node=_writable(preset))
    # Hydra copies the whole store for each group of files that it lists, though it also copies what it loads from it
    store.__deepcopy__ = lambda memo: store


def build_config(composed: DictConfig) -> Any:
    """The composed options as checked dataclasses. Raises ValueError naming the option that is wrong."""
    # nan would pass every range check: it is neither less than 0 nor more than 1
    for name, value in _leaves("", OmegaConf.to_container(composed)):
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, float) and math.isnan(number) for number in numbers):
            raise ValueError(f"{name}: {value} is no number")
    try:
        if "validation" in composed:
            _check_validation(composed.validation)
        return OmegaConf.to_object(composed)
    except MissingMandatoryValue as error:
        raise ValueError(f"{error.full_key} is missing: {error.full_key}=... gives it") from None
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {str(error).splitlines()[0]}") from None


def _check_validation(options: DictConfig) -> None:
    try:
        OmegaConf.to_object(options)
    except OmegaConfBaseException:
        raise
    except ValueError as error:  # which names them as for decoding: a training has another `strategy`
        raise ValueError(f"validation: {error}") from None


def training_command(command: str, schema: type, train: str) -> None:
    """Composes `conf/NAME.yaml` with the command line of asr.NAME, saves the result in `out`, and trains by calling
    `train` (`MODULE:FUNCTION`, heavy, and not needed for --help and --cfg). Ends the process with one line and code 2
    for an option or data that cannot be used."""

    def run(composed: DictConfig) -> None:
        with ends_in_one_line(command):
            composed.out = os.path.expanduser(composed.out)  # as Lightning does
            typed = OverridesParser.create().parse_overrides(list(HydraConfig.get().overrides.task))
            for name, _ in _options(typed):
                if name in FOLLOWING:
                    raise ValueError(f"{name} follows from {FOLLOWING[name]}")
            for override in typed:
                name, adds = override.key_or_group, override.is_add() or override.is_force_add()
                if adds and name not in _names(schema) and not name.startswith("hydra."):  # it would be ignored
                    raise ValueError(_no_such_option(name, schema))
            experiment = HydraConfig.get().runtime.choices.get("experiment")
            if composed.resume:
                composed, experiment = _with_saved_options(composed, schema, typed)
            config = build_config(composed)
            try:
                Path(config.out).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"out={config.out}: the folder cannot be made ({error.strerror})") from None
            for path in (*config.data.train, *config.data.dev):
                if "://" not in path and not os.path.exists(path):
                    raise ValueError(f"{path}: no such file or folder")
            warnings.filterwarnings("ignore", module="lightning")
            with importing():  # once the options are known to be good
                from lightning.pytorch.utilities import rank_zero_only

                from asr.training.trainer import checkpoint_of

                trained_by = resolve_name(train)
            # Lightning sets log levels when it is imported; only the first process reports
            level = logging.WARNING if rank_zero_only.rank else logging.INFO
            logging.basicConfig(level=level, format="%(message)s", force=True)
            logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
            if not (checkpoint_of(config) or rank_zero_only.rank):
                started = OmegaConf.to_container(composed, resolve=True) | {"experiment": experiment}
                with replacing(Path(config.out) / OPTIONS) as unfinished:  # other processes may be reading it
                    OmegaConf.save(started, unfinished)
            try:
                trained_by(config)
            except OSError as error:
                if error.errno not in FULL or error.filename:
                    raise
                raise OSError(error.errno, error.strerror, config.out) from error  # TensorBoard's error names no file

    register()
    replace_closed_outputs()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra then raises errors instead of printing them
    try:
        name = command.removeprefix("asr.")
        hydra.main(version_base="1.3", config_path=str(resource("conf")), config_name=name)(run)()
        sys.stdout.flush()
    except BrokenPipeError:  # `--help | head`
        give_up_output()
        sys.exit(1)
    except KeyboardInterrupt:  # before anything was begun
        fail(command, "interrupted", code=130)
    except (HydraException, ValueError) as error:  # the command line could not be composed
        if unknown := re.match(r"Could not override '(.+?)'", str(error)):
            fail(command, _no_such_option(unknown[1], schema))
        if isinstance(error, OverrideParseException):
            quotes = "a value with characters beyond a-z, A-Z, 0-9 and /-_. needs quotes of its own, \"out='a=b'\""
            fail(command, f"{error.override}: not NAME=VALUE as Hydra reads it ({quotes})")
        cause = error.__cause__
        typed = "" if isinstance(error, HydraException) else f"{' '.join(sys.argv[1:])}: "  # if it names no option
        reason = f" ({str(cause).splitlines()[0]})" if isinstance(cause, OmegaConfBaseException) else ""
        if "is not a ListConfig" in reason:
            reason = " (a list is written in brackets: 'NAME=[A,B]')"
        fail(command, typed + " ".join(str(error).partition("full_key:")[0].split()) + reason)


def _no_such_option(name: str, schema: type) -> str:
    """The message that there is no such option, with suggestions: one of the same group with a similar name, or those
    of other groups with the same name."""
    if is_dataclass(get_type_hints(schema).get(name)):
        return f"{name}: takes no preset here; {name}.NAME=... sets an option of it"
    known = [*_names(schema), *(["experiment"] if schema is TrainConfig else [])]
    group, dot, last = name.rpartition(".")
    beside = [each.rpartition(".")[2] for each in known if each.rpartition(".")[0] == group]
    elsewhere = [each for each in known if not dot and each.rpartition(".")[2] == name]
    meant = elsewhere or [f"{group}{dot}{each}" for each in difflib.get_close_matches(last, beside, n=1)]
    return f"{name}: no such option" + (f"; {' or '.join(meant)}?" if meant else "")


def _names(schema: type, above: str = "") -> Iterator[str]:
    """The names of all options."""
    for name, kind in get_type_hints(schema).items():
        yield f"{above}{name}"
        if is_dataclass(kind):
            yield from _names(kind, f"{above}{name}.")


@contextlib.contextmanager
def ends_in_one_line(command: str) -> Iterator[None]:
    """Ends the process with one line for an error that the user can fix (code 2), if SIGINT or SIGTERM stopped
    Lightning (130 and 143, as in the shell), or if another process of the training ended (1)."""
    try:
        yield
    except (ValueError, OSError, FloatingPointError, OmegaConfBaseException) as error:
        fail(command, error)
    except KeyboardInterrupt:
        fail(command, "interrupted; resume=true continues", code=130)
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            fail(command, "interrupted; resume=true continues", code=130)
        if error.code is not None:
            raise
        fail(command, "ended by SIGTERM; resume=true continues", code=143)
    except RuntimeError as error:  # raised by torch.distributed
        of_a_worker = str(error).startswith("Caught ")
        if of_a_worker or not re.search("closed by peer|reset by peer|Broken pipe", str(error)):
            raise
        fail(command, "another process of the training has ended; resume=true continues", code=1)


def _with_saved_options(composed: DictConfig, schema: type, typed: Sequence[Override]) -> tuple[DictConfig, str | None]:
    """The options of the last checkpoint in `composed.out` (if there is none, those that the training was started
    with), overridden by those `typed` this time; and the experiment that they began with. A shape option that is typed
    as it was at the start has no effect, even if the model that the training started from has another shape.

    Raises ValueError if there is no training to resume, or if what was typed would change the shape of the model or the
    experiment."""
    saved, last = Path(composed.out) / OPTIONS, Path(composed.out) / "checkpoints" / "last.ckpt"
    if not saved.is_file():
        raise ValueError(f"resume=true: no training was started in out={composed.out}")
    names = dict(_options(typed))
    chosen = names.pop("experiment", None)
    if names.pop("model", None):  # a preset
        names |= {f"model.{field}": None for field in composed.model if field not in ("dropout", *OF_THE_REST)}
    try:
        options = OmegaConf.load(saved)
    except YAMLError as error:
        raise ValueError(f"resume=true: {saved}: {' '.join(str(error).split())}") from None
    if not isinstance(options, DictConfig) or not options:
        raise ValueError(f"resume=true: {saved} does not hold the options of a training")
    experiment, started = options.pop("experiment", None), options
    if last.is_file():
        with importing():  # heavy, and only needed here to resume
            from asr.training.resuming import read_checkpoint

        options = OmegaConf.create(read_checkpoint(last)["config"])
    try:
        resumed = OmegaConf.merge(_writable(schema), options)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"resume=true: out={composed.out} is no training of this command ({reason})") from None
    if experiment and chosen not in (None, experiment):
        raise ValueError(f"resume=true: experiment is {experiment} in the training that is to be resumed, not {chosen}")
    for name in names:
        before, now = OmegaConf.select(resumed, name), OmegaConf.select(composed, name)
        if name == "data.normalizer" and now == "auto":  # the checkpoint has the one that it stood for
            continue
        of_the_shape = name.startswith(SHAPE) and name != "model.dropout"
        if of_the_shape and now == OmegaConf.select(started, name):
            continue
        if not (_alike(before, now) if name in ORIGINS else before == now or not of_the_shape):
            raise ValueError(f"resume=true: {name} is {before} in the training that is to be resumed, not {now}")
        OmegaConf.update(resumed, name, now)
    resumed.out = composed.out  # the folder may have been moved or copied
    return resumed, experiment


def _options(typed: Sequence[Override]) -> Iterator[tuple[str, Any]]:
    """The names and values of overrides; for a dictionary (`features={dim: 40}`), those of its leaves."""
    for override in typed:
        yield from _leaves(override.key_or_group, override.value())


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(value, dict):
        yield name, value
    else:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}" if name else key, inner)


def _alike(before: str, now: str) -> bool:
    """Whether two folders hold the same kind of model, with the same tokenizer; assumed so if one is gone."""
    if before == now or not before or not now:
        return before == now
    folders = [Path(before), Path(now)]
    if not all(folder.is_dir() for folder in folders):
        return True
    described = [
        {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name not in VARYING}
        for folder in folders
    ]
    return described[0] == described[1]


def _writable(config: object) -> DictConfig:
    node = OmegaConf.structured(config)
    OmegaConf.set_readonly(node, False)
    for key in node:
        child = node._get_node(key)
        if isinstance(child, DictConfig):
            OmegaConf.set_readonly(child, False)
    return node
