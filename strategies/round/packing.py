"""Packs any state into arrays and JSON values for a checkpoint, and back.

A state is a dataclass. Its fields hold arrays, numbers, strings, None, lists, tuples, sets and dictionaries of these,
further dataclasses and named tuples, and objects with ``state()`` and ``restore(arrays)``, such as a pool. An array
gets the name of its place, ``model.conv1.weight`` say; one that stands in two places is stored once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, get_args, get_type_hints

import numpy as np

from fedcross.core.errors import ConfigError, StorageError
from fedcross.strategies.pool.pool import Arrays

ARRAY, CLASS, DICT, OBJECT, SET, TUPLE = "$array", "$class", "$dict", "$object", "$set", "$tuple"


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
        if value is None or isinstance(value, bool | int | float | str | np.generic):
            return value.item() if isinstance(value, np.generic) else value
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
            if id(value) not in names:
                if path in packed.arrays:
                    raise ConfigError(f"{type(state).__name__}: two arrays have the name {path}. Rename a key.")
                names[id(value)] = path
                packed.arrays[path] = value
            return {ARRAY: names[id(value)]}
        if is_dataclass(value) and not isinstance(value, type):
            parts = {part.name: getattr(value, part.name) for part in fields(value)}
            return {CLASS: type(value).__name__} | {name: one(part, _below(path, name)) for name, part in parts.items()}
        if isinstance(value, Mapping):
            if all(isinstance(name, str) and not name.startswith("$") for name in value):
                return {name: one(inner, _below(path, name)) for name, inner in value.items()}
            return {DICT: [[one(name, path), one(inner, _below(path, name))] for name, inner in value.items()]}
        if isinstance(value, list | tuple):
            found = [one(inner, _below(path, i)) for i, inner in enumerate(value)]
            named = {CLASS: type(value).__name__} if hasattr(value, "_fields") else {}
            return found if isinstance(value, list) else {TUPLE: found, **named}
        if isinstance(value, set | frozenset):
            return {SET: sorted(value)}
        if hasattr(value, "state") and hasattr(value, "restore"):
            return {OBJECT: {name: one(array, _below(path, name)) for name, array in value.state().items()}}
        raise ConfigError(
            f"{type(state).__name__}.{path}: a {type(value).__name__} cannot be stored in a checkpoint. Keep arrays, "
            "numbers, strings, lists, dictionaries or dataclasses of these."
        )

    packed.values = one(state, "")
    return packed


def _below(path: str, name: Any) -> str:
    text = "-".join(map(str, name)) if isinstance(name, tuple) else str(name)
    return f"{path}.{text}" if path else text


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

    def one(value: Any, like: Any = None) -> Any:
        if isinstance(value, list):
            likes = like if isinstance(like, list) and len(like) == len(value) else [None] * len(value)
            return list(map(one, value, likes))
        if not isinstance(value, dict):
            return value
        if ARRAY in value:
            return packed.arrays[value[ARRAY]]
        if TUPLE in value:
            found = tuple(one(value[TUPLE], list(like) if isinstance(like, tuple) else None))
            return known[value[CLASS]](*found) if CLASS in value else found
        if SET in value:
            return set(value[SET])
        if DICT in value:
            keys = [one(name) for name, _ in value[DICT]]
            return {name: one(inner, _in(like, name)) for name, (_, inner) in zip(keys, value[DICT])}
        if OBJECT in value:
            like.restore({name: one(inner) for name, inner in value[OBJECT].items()})
            return like
        if CLASS in value:
            kind = known[value[CLASS]]
            own = like if isinstance(like, kind) else None
            return kind(**{n: one(inner, getattr(own, n, None)) for n, inner in value.items() if n != CLASS})
        return {name: one(inner, _in(like, name)) for name, inner in value.items()}

    if packed.values.get(CLASS) != type(fresh).__name__:
        raise StorageError(f"a state of {packed.values.get(CLASS)}, not of {type(fresh).__name__}.")
    try:
        return one(packed.values, fresh)
    except (AttributeError, LookupError, TypeError) as error:
        raise StorageError(f"another version of {type(fresh).__name__} wrote this state ({error!r}).") from error


def _in(like: Any, name: Any) -> Any:
    return like.get(name) if isinstance(like, Mapping) else None


def check(state: Any) -> None:
    """Raise a ConfigError if a checkpoint could not hold `state`, or a resumed run could not make it again."""
    pack(state)
    try:
        _known(state, {})
    except NameError as error:
        raise ConfigError(
            f"{type(state).__name__}: the type {error.name} of a field is not there when the program runs. Import it "
            "outside of TYPE_CHECKING."
        ) from error


def _known(value: Any, found: dict[str, Any]) -> None:
    """Collect the dataclasses and named tuples that a state consists of, or may consist of by its types, by name."""
    if is_dataclass(value) and not isinstance(value, type):
        _classes(type(value), found)
        for part in fields(value):
            _known(getattr(value, part.name), found)
    for inner in value if isinstance(value, list) else ():
        _known(inner, found)


def _classes(hint: Any, found: dict[str, Any]) -> None:
    for inner in get_args(hint):
        _classes(inner, found)
    if isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_fields")) and hint.__name__ not in found:
        found[hint.__name__] = hint
        for inner in get_type_hints(hint).values():
            _classes(inner, found)
