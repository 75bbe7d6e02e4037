"""The folder that a model lives in: `model.safetensors` and `config.json`. Nothing in it is ever unpickled."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

WEIGHTS, CONFIG = "model.safetensors", "config.json"
KINDS = {  # by what config.json calls their shape
    "model": "a recogniser",
    "language_model": "a language model (asr.train_lm)",
    "encoder": "an encoder alone (asr.pretrain), where asr.train init_from=... can begin",
}


class ModelError(ValueError):
    """A folder that holds no model that this version can read; the message names the folder."""


def write_folder(folder: str | Path, module: nn.Module, description: dict[str, Any], dtype: torch.dtype) -> None:
    """Writes the weights of `module`, each shared tensor once, parameters in `dtype`, and the description. Weights that
    were there are whole until the new ones are, for those who read them meanwhile, too."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=True)}
    shared = {name for name, _ in module.named_parameters(remove_duplicate=False)} - parameters
    tensors = {
        name: tensor.to(dtype if name in parameters else tensor.dtype).contiguous().cpu()
        for name, tensor in module.state_dict().items()
        if name not in shared
    }
    write_tensors(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """A safetensors file at once, for all whom the umask lets read it: `save_file` lets its owner alone."""
    unfinished = path.with_name(f".{path.name}")
    unfinished.unlink(missing_ok=True)
    unfinished.touch()
    mode = unfinished.stat().st_mode
    save_file(tensors, unfinished, metadata={"format": "pt"})
    unfinished.chmod(mode)
    unfinished.replace(path)


class WithoutStartValues(TorchFunctionMode):
    """Modules built inside draw no random numbers: their weights are about to be overwritten.

    Building them on the meta device would do too, but it imports a second's worth of torch's compiler."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (Tensor.normal_, Tensor.uniform_):
            return args[0]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def read_folder(folder: str | Path, *kinds: str) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """The description and the weights of a folder that holds one of `kinds`; whatever proves wrong with them, inside
    the block, too, is a ModelError."""
    folder = Path(folder)
    try:
        description = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        other = next((kind for kind in KINDS if kind in description and kind not in kinds), None)
        if other:
            wanted = " or ".join(KINDS[kind].partition(" (")[0] for kind in kinds)
            raise ModelError(f"{folder}: this is {KINDS[other]}, not {wanted}")
        yield description, load_file(folder / WEIGHTS)
    except ModelError:
        raise
    except FileNotFoundError as error:
        missing = f"{Path(error.filename).name} is missing" if error.filename else str(error)
        raise ModelError(f"{folder}: not a model folder ({missing})") from None
    except OSError as error:
        raise ModelError(f"{folder}: not a model folder ({error.strerror or error})") from None
    except (KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{folder}: not a model that this version reads ({str(error).splitlines()[0]})") from None


def load_weights(module: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copies stored weights into `module`; a tensor that it holds under several names is stored under the first."""
    first = {parameter: name for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name not in weights and first[parameter] in weights:
            weights[name] = weights[first[parameter]]
    module.load_state_dict(weights)
