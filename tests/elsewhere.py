"""A device other than the CPU, for machines that have no other.

Its tensors claim to be on torch's `meta` device and hold their values on the CPU. Mixing the two devices raises, as it
would on a GPU, and every wait for a GPU is recorded.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("meta")
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
LENGTHS_ON_THE_CPU = ("aten._use_cudnn_ctc_loss.Tensor", "aten._ctc_loss.Tensor", "aten._ctc_loss_backward.Tensor")
WAITING = (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default)

waits: list[str] = []  # the lines of the package that would wait for a GPU


class Elsewhere(torch.Tensor):
    """A tensor on that device; `held` has its values."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Elsewhere:
        with torch.inference_mode(False):
            return torch.Tensor._make_wrapper_subclass(
                cls, held.size(), strides=held.stride(), dtype=held.dtype, device=DEVICE
            )

    def __init__(self, held: torch.Tensor):
        self.held = held

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.stft:  # stft changes strides in place
            return _compute(function, args, kwargs, elsewhere=True)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _dispatch(function, args, kwargs or {})

    def tolist(self) -> list:
        return self.cpu().tolist()


class _Factories(TorchDispatchMode):
    """Intercepts the functions that create tensors on `DEVICE` or move them there."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(isinstance(x, Elsewhere) for x in _leaves((args, kwargs))) or kwargs.get("device") is not None:
            return _dispatch(function, args, kwargs)
        return function(*args, **kwargs)


class _Generator(torch.Generator):
    def __new__(cls, device: torch.device | str = "cpu"):
        return super().__new__(cls, "cpu")


@contextmanager
def elsewhere() -> Iterator[None]:
    """A context within which `DEVICE` computes."""

    def tensor(data, dtype=None, device=None):
        made = make(data, dtype=dtype)
        return made if device is None else made.to(device)

    def as_on_the_cpu(function):
        return lambda device, *args, **kwargs: function("cpu" if device == DEVICE.type else device, *args, **kwargs)

    make = torch.tensor
    of_autocast = ("autocast", "is_autocast_enabled", "get_autocast_dtype")
    patches = {name: as_on_the_cpu(getattr(torch, name)) for name in of_autocast}
    waits.clear()
    with mock.patch.multiple(torch, tensor=tensor, Generator=_Generator, **patches), _Factories():
        yield


def move(module: nn.Module) -> None:
    """Moves `module` to `DEVICE`, with shared parameters still shared, as torch ensures for its own tensors."""
    names = defaultdict(list)
    for name, p in module.named_parameters(remove_duplicate=False):
        names[p].append(name)
    module.to(DEVICE)
    for first, *others in names.values():
        for name in others:
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, module.get_parameter(first))


def _dispatch(function, args: tuple, kwargs: dict):
    with _Factories():
        decomposed = function.decompose(*args, **kwargs)  # in inference mode, composite functions arrive undecomposed
    if decomposed is not NotImplemented:
        return decomposed
    tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    ours = [x for x in tensors if isinstance(x, Elsewhere)]
    others = [x for x in tensors if not isinstance(x, Elsewhere) and x.dim()]
    wanted = kwargs.get("device")
    result = bool(ours) if wanted is None else torch.device(wanted) == DEVICE
    back = function is aten._to_copy.default and not result
    back |= function is aten.copy_.default and not isinstance(args[0], Elsewhere)
    if ours and others and function not in COPIES and str(function) not in LENGTHS_ON_THE_CPU:
        raise RuntimeError(f"{function} of tensors on two devices, at {_line()}")
    if ours and (back or function in WAITING):
        waits.append(_line())
    if wanted is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    return _compute(function, args, kwargs, result)


def _compute(function, args: tuple, kwargs: dict, elsewhere: bool):
    known = {id(x.held): x for x in _leaves((args, kwargs)) if isinstance(x, Elsewhere)}
    args, kwargs = _map(lambda x: x.held if isinstance(x, Elsewhere) else x, (args, kwargs))
    found = function(*args, **kwargs)
    if not elsewhere:
        return found

    def there(x):
        if not isinstance(x, torch.Tensor):
            return x
        return known[id(x)] if id(x) in known else Elsewhere(x)

    return _map(there, found)


def _leaves(tree: Any) -> Iterator[Any]:
    """As torch's `tree_leaves`, but for what operators take, and several times as fast."""
    if type(tree) in (tuple, list, dict):
        for inner in tree.values() if type(tree) is dict else tree:
            yield from _leaves(inner)
    else:
        yield tree


def _map(change: Callable[[Any], Any], tree: Any) -> Any:
    """As torch's `tree_map`, but for what operators take and return."""
    if type(tree) is dict:
        return {name: _map(change, inner) for name, inner in tree.items()}
    return type(tree)(_map(change, inner) for inner in tree) if type(tree) in (tuple, list) else change(tree)


def _line() -> str:
    for frame in reversed(traceback.extract_stack()):
        if "/asr/" in frame.filename:
            return f"asr/{frame.filename.rsplit('/asr/')[-1]}: {frame.line}"
    return "a test"
