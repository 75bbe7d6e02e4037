"""The folder that holds a model: `model.safetensors` and `config.json`. Nothing in it is ever unpickled.

Weights on disk are float32, float16 or int8; in int8 each row of a matrix has its own scale, stored next to the matrix.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from asr.files import replacing

LONGEST_REASON = 300  # characters of an error of torch's that are quoted
WEIGHTS, CONFIG = "model.safetensors", "config.json"
SCALE = ".scale"  # suffix to the name of an int8 tensor
KINDS = {  # by the key of the model's shape in config.json
    "model": "a recogniser",
    "language_model": "a language model (asr.train_lm)",
    "encoder": "an encoder alone (asr.pretrain), where asr.train init_from=... can begin",
}
OTHER = "another program's model (asr.import_model reads Whisper's and Speech2Text's)"
# what damaged files raise, here and in the libraries that read them (sentencepiece: IndexError), besides OSError
UNREADABLE = (
    LookupError, TypeError, ValueError, ArithmeticError, AttributeError, EOFError, RuntimeError, SafetensorError,
)  # fmt: skip


class ModelError(ValueError):
    """Raised if a folder holds no model that this version can read; the message names the folder."""


def write_folder(folder: str | Path, module: nn.Module, description: dict[str, Any], dtype: str) -> None:
    """Writes the weights of `module`, each shared tensor once, parameters in `dtype` (with int8, those of one
    dimension in float16), and the description. Existing weights stay intact until the new ones are complete, also for
    concurrent readers."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=True)}
    shared = {name for name, _ in module.named_parameters(remove_duplicate=False)} - parameters
    tensors = {}
    for name, tensor in module.state_dict().items():
        if name in parameters and dtype == "int8" and tensor.dim() > 1:
            tensors[name], tensors[name + SCALE] = _quantized(tensor.cpu())
        elif name not in shared:
            of_disk = torch.float32 if dtype == "float32" else torch.float16
            tensors[name] = tensor.to(of_disk if name in parameters else tensor.dtype).contiguous().cpu()
    write_tensors(tensors, folder / WEIGHTS)
    write_json(description, folder / CONFIG)


def _quantized(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """`tensor (rows, ...)` as int8, and the float32 scale that each row has to be multiplied by."""
    scale = tensor.float().flatten(1).abs().amax(dim=1).clamp(min=1e-12) / 127
    return (tensor.float() / _beside(scale, tensor)).round().to(torch.int8).contiguous(), scale


def _beside(scale: Tensor, tensor: Tensor) -> Tensor:
    return scale.view(-1, *[1] * (tensor.dim() - 1))


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file; int8 tensors are converted back to float32."""
    tensors = load_file(path)
    for name in [name for name in tensors if name + SCALE in tensors]:
        scale = tensors.pop(name + SCALE)
        tensors[name] = tensors[name].float() * _beside(scale, tensors[name])
    return tensors


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Writes a safetensors file atomically, with permissions by the umask (`save_file` lets only its owner read it)."""
    try:
        with replacing(path) as unfinished:
            unfinished.unlink(missing_ok=True)
            unfinished.touch()
            mode = unfinished.stat().st_mode
            save_file(tensors, unfinished, metadata={"format": "pt"})
            unfinished.chmod(mode)
    except SafetensorError as error:  # of a full disk
        raise OSError(f"{path}: {error}") from None


def write_json(content: dict[str, Any], path: Path) -> None:
    """Writes a JSON file atomically; numpy's numbers are written as numbers."""
    with replacing(path) as unfinished:
        text = json.dumps(content, indent=2, default=lambda number: number.item())
        unfinished.write_text(text + "\n", encoding="utf-8")


class WithoutStartValues(TorchFunctionMode):
    """Modules built inside draw no random numbers: their weights are about to be overwritten.

    Building them on the meta device would work, too, but imports torch's compiler, which takes a second."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (Tensor.normal_, Tensor.uniform_):
            return args[0]
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def described(folder: str | Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """The contents of `config.json`, for a folder that holds one of `kinds`; any error with the folder, including those
    raised inside the block, becomes a ModelError."""
    folder = Path(folder)
    try:
        description = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        found = next((kind for kind in KINDS if kind in description), None)
        if found not in kinds and (found or "model_type" in description):
            wanted = " or ".join(KINDS[kind].partition(" (")[0] for kind in kinds)
            raise ModelError(f"{folder}: this is {KINDS.get(found, OTHER)}, not {wanted}")
        yield description
    except ModelError:
        raise
    except FileNotFoundError as error:
        missing = f"{Path(error.filename).name} is missing" if error.filename else str(error)
        inside = folder / "model"  # as in the folder of a training
        hint = f"; {inside} is one" if (inside / CONFIG).is_file() else ""
        raise ModelError(f"{folder}: not a model folder ({missing}){hint}") from None
    except OSError as error:
        raise ModelError(f"{folder}: not a model folder ({error.strerror or error})") from None
    except UNREADABLE as error:
        reason = " ".join(str(error).split("\n")[:2])  # torch's second line says what does not fit, tensor by tensor
        reason = shorten(reason, LONGEST_REASON, placeholder=" ...")
        raise ModelError(f"{folder}: not a model that this version can read ({reason})") from None


def load_weights(module: nn.Module, folder: str | Path) -> None:
    """Copies the weights in a folder into `module`, in float32; a tensor that it has under several names is stored
    under the first."""
    weights = _read_tensors(Path(folder) / WEIGHTS)
    first = {parameter: name for name, parameter in module.named_parameters()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name not in weights and first[parameter] in weights:
            weights[name] = weights[first[parameter]]
    module.float().load_state_dict(weights)  # torch's default type may be another
