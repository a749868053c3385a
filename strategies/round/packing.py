"""Packs any state into arrays and JSON values for a checkpoint, and back.

A state is a dataclass. Its fields hold arrays, numbers, strings, None, lists, tuples, sets and dictionaries of these,
further dataclasses and named tuples, and objects with ``state()`` and ``restore(arrays)``, such as a pool. An array
gets the name of its place, ``model.conv1.weight`` say; one that stands in two places is stored once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol, get_args, get_type_hints, runtime_checkable

import numpy as np

from fedcross.core.errors import ConfigError, StorageError
from fedcross.strategies.pool.pool import Array, Arrays

ARRAY, CLASS, DICT, OBJECT, SET, TUPLE = "$array", "$class", "$dict", "$object", "$set", "$tuple"


@runtime_checkable
class Storable(Protocol):
    """An object that itself says which arrays it consists of, and loads them."""

    def state(self) -> dict[str, Array]:
        """Return the arrays."""
        ...

    def restore(self, state: Mapping[str, Array]) -> None:
        """Load the arrays."""
        ...


@dataclass
class Packed:
    """What a checkpoint holds: arrays, and JSON values that say where they belong."""

    arrays: Arrays = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def pack(state: Any) -> Packed:
    """Return `state`, a dataclass, as arrays (not copied) and JSON values.

    Raises
    ------
    ConfigError
        If a field holds something else than this module packs.
    """
    packed, names = Packed(), dict[int, str]()

    def one(value: Any, path: str) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
            if id(value) not in names:
                names[id(value)] = path
                packed.arrays[path] = value
            return {ARRAY: names[id(value)]}
        if is_dataclass(value) and not isinstance(value, type):
            return {CLASS: type(value).__name__} | {
                part.name: one(getattr(value, part.name), _below(path, part.name)) for part in fields(value)
            }
        if isinstance(value, Mapping):
            if all(isinstance(name, str) and not name.startswith("$") for name in value):
                return {name: one(inner, _below(path, name)) for name, inner in value.items()}
            return {DICT: [[one(name, path), one(inner, _below(path, _text(name)))] for name, inner in value.items()]}
        if isinstance(value, list | tuple):
            found = [one(inner, _below(path, str(i))) for i, inner in enumerate(value)]
            if isinstance(value, list):
                return found
            return {TUPLE: found, CLASS: type(value).__name__} if hasattr(value, "_fields") else {TUPLE: found}
        if isinstance(value, set | frozenset):
            return {SET: sorted(value)}
        if isinstance(value, Storable):
            return {OBJECT: {name: one(array, _below(path, name)) for name, array in value.state().items()}}
        raise ConfigError(
            f"{type(state).__name__}.{path}: a {type(value).__name__} cannot be stored in a checkpoint. Keep arrays, "
            "numbers, strings, lists, dictionaries or dataclasses of these."
        )

    packed.values = one(state, "")
    return packed


def unpack(packed: Packed, fresh: Any) -> Any:
    """Return the state that :func:`pack` packed.

    Parameters
    ----------
    packed : Packed
        From a state of the same class.
    fresh : dataclass
        A new state of that class; the pools in it are loaded and become part of the result.

    Raises
    ------
    StorageError
        If `packed` is the state of another class, or of another version of it.
    """
    known: dict[str, Any] = {}
    _known(fresh, known)

    def one(value: Any, like: Any) -> Any:
        if isinstance(value, list):
            likes = like if isinstance(like, list) and len(like) == len(value) else [None] * len(value)
            return [one(inner, like) for inner, like in zip(value, likes)]
        if not isinstance(value, dict):
            return value
        if ARRAY in value:
            return packed.arrays[value[ARRAY]]
        if TUPLE in value:
            found = tuple(one(inner, None) for inner in value[TUPLE])
            return known[value[CLASS]](*found) if CLASS in value else found
        if SET in value:
            return set(value[SET])
        if DICT in value:
            return {one(name, None): one(inner, None) for name, inner in value[DICT]}
        if OBJECT in value:
            like.restore({name: one(inner, None) for name, inner in value[OBJECT].items()})
            return like
        if CLASS in value:
            kind = known[value[CLASS]]
            own = like if isinstance(like, kind) else None
            return kind(**{n: one(inner, getattr(own, n, None)) for n, inner in value.items() if n != CLASS})
        return {name: one(inner, None) for name, inner in value.items()}

    if packed.values.get(CLASS) != type(fresh).__name__:
        raise StorageError(f"a state of {packed.values.get(CLASS)}, not of {type(fresh).__name__}.")
    try:
        return one(packed.values, fresh)
    except (AttributeError, LookupError, TypeError) as error:
        raise StorageError(f"another version of {type(fresh).__name__} wrote this state ({error!r}).") from error


def _known(value: Any, found: dict[str, Any]) -> None:
    """Collect the dataclasses and named tuples that a state consists of, or may consist of by its types, by name."""
    if is_dataclass(value) and not isinstance(value, type):
        _classes(type(value), found)
        for part in fields(value):
            _known(getattr(value, part.name), found)
    for inner in value if isinstance(value, list) else ():
        _known(inner, found)


def _classes(hint: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Return the dataclasses and named tuples that the types of a dataclass mention, by name."""
    for inner in get_args(hint):
        _classes(inner, found)
    if isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_fields")) and hint.__name__ not in found:
        found[hint.__name__] = hint
        for inner in get_type_hints(hint).values():
            _classes(inner, found)
    return found


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _text(name: Any) -> str:
    return "-".join(map(str, name)) if isinstance(name, tuple) else str(name)
