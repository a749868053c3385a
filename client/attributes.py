"""Looks into what a method holds: what can change there, how to notice it, and how to put it back."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from io import IOBase
from pathlib import PurePath
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), PurePath, np.generic, torch.device, torch.dtype)
_LISTS = (list, tuple, set, frozenset, deque)
#: Attributes that torch gives every module.
_TORCHS = set(vars(nn.Module())) - {"training"}
#: Bytes of a numpy array whose contents are compared at every visit; of a larger one only which it is.
SMALL = 2**16
#: How many objects, lists and dictionaries one in the other are looked into.
DEPTH = 3
Put = Callable[[], object]


class Own:
    """Knows the network that trains, whose tensors a step does change."""

    def __init__(self, module: nn.Module) -> None:
        tensors = [*module.parameters(), *module.buffers()]
        tensors += [p.grad for p in module.parameters() if p.grad is not None]
        #: Keeps them: no other object takes their place.
        self._objects = {id(one): one for one in (*module.modules(), *tensors)}
        self._places = {place for tensor in tensors if (place := _place(tensor))}

    def has(self, value: object) -> bool:
        """Return whether `value` is a module, a parameter, a buffer, a gradient of the network, or a view of one."""
        return id(value) in self._objects or (isinstance(value, Tensor) and _place(value) in self._places)


class Same:
    """Equal to another one of the same object and version. It keeps the object: no other one takes its place."""

    def __init__(self, value: object, version: int = 0) -> None:
        self._value, self._version = value, version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._value is other._value and self._version == other._version

    __hash__ = None  # type: ignore[assignment]


class Kept:
    """Puts the values of a tensor back to how they are now."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version, self._values = tensor, _version(tensor), tensor.detach().clone()

    def __call__(self) -> None:
        """Put them back."""
        if _version(self._tensor) != self._version or self.in_secret():
            self._tensor.detach().copy_(self._values)

    def in_secret(self) -> bool:
        """Return whether they are others without another version, as after ``tensor.data.add_(1)``."""
        return _version(self._tensor) == self._version and not torch.equal(self._tensor.detach(), self._values)


def places_of(owner: object) -> dict[str, Any]:
    """Return the dictionary in which `owner` has its attributes; an empty one if it has none."""
    own = getattr(owner, "__dict__", None)
    return own if isinstance(own, dict) else {}  # a class has a view only


def children(value: object) -> dict[str, Any]:
    """Return what `value` holds, by a name; empty if it cannot be looked into."""
    if isinstance(value, dict):
        return {repr(key): one for key, one in value.items()}
    if isinstance(value, _LISTS):
        return {str(place): one for place, one in enumerate(value)}
    if isinstance(value, nn.Module):
        found: dict[str, Any] = dict([*value.named_parameters(), *value.named_buffers()])
        for name, part in value.named_modules():
            found |= {f"{name} {key}": one for key, one in vars(part).items() if key not in _TORCHS}
        return found
    if isinstance(value, (*PLAIN, Tensor, np.ndarray, ModuleType, type)):
        return {}
    return _slots(value) | places_of(value)


def mark(value: Any, own: Own, depth: int = DEPTH, *, versions: bool = True) -> Any:
    """Return what is equal for a value that is the same; tensors are if their `versions` are, or their place alone."""
    if own.has(value):
        return Same(value)
    if isinstance(value, Tensor):
        return Same(value, _version(value) if versions else 0)
    if isinstance(value, PLAIN):
        return type(value), repr(value)
    if isinstance(value, np.ndarray) and (versions or value.nbytes <= SMALL):
        return value.shape, value.tobytes()
    if isinstance(value, torch.Generator):
        return Same(value)  # to read its state is an operation of torch; a draw is refused before the recording
    if versions and (stream := _stream(value)) is not None:
        return Same(value), repr(stream[1])
    inside = children(value) if depth else {}
    marks = {name: mark(one, own, depth - 1, versions=versions) for name, one in inside.items()}
    if depth and isinstance(value, (dict, *_LISTS)):
        return marks
    return (Same(value), marks) if marks else Same(value)


def putting_back(value: Any, own: Own, known: dict[int, Any], depth: int = DEPTH + 1) -> Iterator[Put]:
    """Yield what puts `value` and all it holds back to how it is now; `known` has what was met before."""
    if isinstance(value, PLAIN) or own.has(value) or id(value) in known:
        return
    known[id(value)] = value
    if isinstance(value, Tensor):
        yield Kept(value)
    elif isinstance(value, np.ndarray) and value.flags.writeable:
        yield partial(np.copyto, value, value.copy())
    elif (stream := _stream(value)) is not None:
        yield partial(stream[0], stream[1])
    elif depth:
        yield from _putting_content(value)
        for one in list(children(value).values()):
            yield from putting_back(one, own, known, depth - 1)


def _putting_content(value: Any) -> Iterator[Put]:
    """Yield what gives `value` the objects that it holds now."""
    if isinstance(value, (dict, set, list, deque)):
        yield partial(_refill, value, value.copy())
    elif isinstance(value, nn.Module):
        for part in value.modules():
            yield from (partial(_refill, one, one.copy()) for one in vars(part).values() if isinstance(one, dict))
            yield partial(_refill, vars(part), dict(vars(part)))
    elif children(value) and not isinstance(value, (tuple, frozenset)):
        yield partial(_refill, places_of(value), dict(places_of(value)))
        yield from (partial(object.__setattr__, value, name, one) for name, one in _slots(value).items())


def _refill(place: Any, content: Any) -> None:
    place.clear()
    (place.extend if isinstance(place, (list, deque)) else place.update)(content)


def iterator(value: object) -> str:
    """Return why what draws from `value` cannot be recorded, as the end of a sentence; empty if it may be."""
    if isinstance(value, torch.Generator) and value.device.type != "cpu":
        return "draws random numbers on a GPU, whose state a recording does not go on with"
    if isinstance(value, Iterator) and not isinstance(value, IOBase) and not children(value):
        return f"holds a {type(value).__name__}, which nobody can put back to where it was"
    return ""


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _place(tensor: Tensor) -> int:
    """Return where a tensor has its values; 0 if it has no memory of its own."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


def _slots(value: object) -> dict[str, Any]:
    """Return the attributes that the class of `value` has places for."""
    places = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    names = [name for some in places for name in ([some] if isinstance(some, str) else some)]
    return {
        name: getattr(value, name) for name in names if name not in {"__dict__", "__weakref__"} and hasattr(value, name)
    }


def _stream(value: object) -> tuple[Callable[[Any], object], Any] | None:
    """Return what sets the state of a generator of random numbers on the CPU, and its state; None for other values."""
    if isinstance(value, random.Random):
        return value.setstate, value.getstate()
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state"), value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.set_state, value.get_state()
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        state = value.get_state()
        return value.set_state, state
    return None
