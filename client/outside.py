"""What a step could change beside its state: a recording keeps that as it was, and a comparison changes it once more.

Such are attributes of the method's objective and of the network's modules, prepared tensors, and the random numbers of
Python and numpy. A step that changes one of them is not recorded.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import PurePath
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: Attributes of a module that hold what a step does change, or other modules.
_OWN = {"_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs"}
#: Attributes at which nobody looks between visits: those, and torch's own of every module.
_BETWEEN = _OWN | set(vars(nn.Module())) - {"training"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), PurePath, np.generic, torch.device, torch.dtype)
_LISTS = (list, tuple, set, frozenset, deque)
#: Bytes of a numpy array whose contents are compared at every visit; of a larger one only which it is.
SMALL = 2**16
#: Place -> what stands there, compared by value, or by identity for what has no plain value.
Marks = dict[str, Any]


class Outside:
    """What steps of one kind should leave alone.

    Parameters
    ----------
    objective : object
        The method's client half.
    module : nn.Module
        The network.
    prepared : iterable
        What the objective prepared; only tensors are looked at.
    """

    def __init__(self, objective: object, module: nn.Module, prepared: Iterable[Any]) -> None:
        self._tensors = [leaf for leaf in prepared if isinstance(leaf, Tensor)]
        self._held: dict[str, Tensor] = {}
        self._owners = {"the method": _attributes(objective)}
        self._owners |= {f"layer {name or 'of all'}": _attributes(part) for name, part in module.named_modules()}
        self._trained = dict(module.named_parameters())
        own = {id(one) for one in (*module.modules(), *module.parameters(), *module.buffers())}
        for held, value in _attributes(objective).items():
            if isinstance(value, nn.Module):
                others = [(name, part) for name, part in value.named_modules() if id(part) not in own]
                self._owners |= {f"the method's {'.'.join(filter(None, (held, n)))}": _attributes(p) for n, p in others}
                tensors = (*value.named_parameters(held), *value.named_buffers(held))
                self._held |= {name: tensor for name, tensor in tensors if id(tensor) not in own}

    def marks(self) -> Marks:
        """Return how everything is now."""
        found: Marks = {f"prepared tensor {i}": _Same(t, t._version) for i, t in enumerate(self._tensors)}
        found |= {f"the method's {name}": _Same(t, t._version) for name, t in self._held.items()}
        for owner, attributes in self._owners.items():
            for name, value in attributes.items():
                if name not in _OWN:
                    found[f"attribute {name} of {owner}"] = _mark(value)
        found["Python's random numbers"] = random.getstate()
        found["numpy's random numbers"] = [_mark(one) for one in np.random.get_state()]  # noqa: NPY002 - users' own draws
        return found

    def keep(self) -> Callable[[], None]:
        """Return what brings everything back to how it is now."""
        owners = [(attributes, dict(attributes)) for attributes in self._owners.values()]
        tensors = [*self._tensors, *self._held.values()]
        tensors += [*(one for _, saved in owners for one in saved.values() if type(one) is Tensor)]
        streams = [put for _, saved in owners for one in saved.values() if (put := _stream(one)) is not None]
        copies = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors]
        contents = [(value, list(value)) for _, saved in owners for value in saved.values() if type(value) is list]
        draws = random.getstate(), np.random.get_state()  # noqa: NPY002

        def back() -> None:
            for attributes, saved in owners:
                attributes.clear()
                attributes.update(saved)
            for tensor, version, copy in copies:
                if tensor._version != version:
                    tensor.detach().copy_(copy)
            for value, content in contents:
                value[:] = content
            for put, state in streams:
                put(state)
            random.setstate(draws[0])
            np.random.set_state(draws[1])  # noqa: NPY002

        return back

    def watch(self) -> Callable[[], str]:
        """Return what names an attribute that is another one than now, empty if none is; cheap, for every visit.

        A tensor is the same in its place, whatever its values: a recording reads them there.
        """
        saved = [
            (owner, attributes, {name: _kept(value) for name, value in attributes.items() if name not in _BETWEEN})
            for owner, attributes in self._owners.items()
        ]

        slopes = {name: p.requires_grad for name, p in self._trained.items()}

        def other() -> str:
            for name, needed in slopes.items():
                if self._trained[name].requires_grad != needed:
                    return f"whether {name} is trained"
            for owner, attributes, before in saved:
                for name, value in attributes.items():
                    if name not in _BETWEEN and not _stands(before.get(name), value):
                        return f"attribute {name} of {owner}"
                if gone := before.keys() - attributes.keys():
                    return f"attribute {min(gone)} of {owner}"
            return ""

        return other


def changed(before: Marks, after: Marks) -> str:
    """Return a place that is not as it was; empty if all are."""
    places = [place for place in {**before, **after} if before.get(place) != after.get(place)]
    return min(places, default="")


class _Same:
    """Equal to another one of the same object and version. It keeps the object: no other one takes its place."""

    def __init__(self, value: object, version: int = 0) -> None:
        self._value, self._version = value, version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value and self._version == other._version

    __hash__ = None  # type: ignore[assignment]


def _attributes(owner: object) -> dict[str, Any]:
    own = getattr(owner, "__dict__", None)
    return own if isinstance(own, dict) else {}  # a class has a view only


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
    if isinstance(value, torch.Generator) and value.device.type == "cpu":
        state = value.get_state()
        return value.set_state, state
    return None


def _kept(value: Any) -> tuple[Any, Any]:
    """Return `value`, and its mark if it can change in its place; None if it is compared by identity first."""
    fixed = (*_PLAIN, Tensor, nn.Module)
    flat = isinstance(value, tuple) and all(isinstance(one, _PLAIN) for one in value)
    return value, None if flat or isinstance(value, fixed) else _mark(value, versions=False)


def _stands(before: tuple[Any, Any] | None, value: Any) -> bool:
    """Return whether `value` is what :func:`_kept` kept."""
    if before is None:
        return False
    old, mark = before
    if mark is None:
        return value is old or bool(_mark(value, versions=False) == _mark(old, versions=False))
    return bool(_mark(value, versions=False) == mark)


def _mark(value: Any, depth: int = 3, *, versions: bool = True) -> Any:
    """Return what is equal for a value that is the same; tensors are if their `versions` are, or their place alone.

    The latter also in objects, one of which may be the net, whose parameters a step changes.
    """
    if isinstance(value, nn.Parameter) or (isinstance(value, Tensor) and not versions):
        return _Same(value)  # a step changes parameters
    if isinstance(value, Tensor):
        return _Same(value, value._version)
    if isinstance(value, _PLAIN):
        return type(value), repr(value)
    if isinstance(value, np.ndarray) and (versions or value.nbytes <= SMALL):
        return value.shape, value.tobytes()
    if depth and isinstance(value, dict):
        return {repr(key): _mark(one, depth - 1, versions=versions) for key, one in value.items()}
    if depth and isinstance(value, _LISTS):
        return [_mark(one, depth - 1, versions=versions) for one in value]
    if versions and (stream := _stream(value)) is not None:
        return _Same(value), stream[1].numpy().tobytes() if isinstance(stream[1], Tensor) else repr(stream[1])
    own = _slots(value) | _attributes(value)
    if depth and own and not isinstance(value, (nn.Module, ModuleType)):
        return _Same(value), {name: _mark(one, depth - 1, versions=False) for name, one in own.items()}
    return _Same(value)
