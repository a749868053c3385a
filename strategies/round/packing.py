"""What a checkpoint holds of a run: any state as arrays and JSON values, and the average of its global models.

A state is a dataclass. Its fields hold arrays, numbers, strings, None, lists, tuples, sets and dictionaries of these,
further dataclasses and named tuples, and objects with ``state()`` and ``restore(arrays)``, such as a pool. An array
gets the name of its place, ``model.conv1.weight`` say; one that stands in two places is stored once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np

from fedcross.core.errors import ConfigError, StorageError
from fedcross.strategies.parts.averaging import first_late
from fedcross.strategies.pool.pool import Arrays
from fedcross.strategies.round.settings import AverageSettings

ARRAY, CLASS, DICT, OBJECT, SET, TUPLE = "$array", "$class", "$dict", "$object", "$set", "$tuple"


@dataclass
class Packed:
    """What a checkpoint holds: arrays, and JSON values that say where they belong."""

    arrays: Arrays = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


def pack(state: Any) -> Packed:
    """Return `state`, a dataclass, as arrays (not copied) and JSON values; a ConfigError names what cannot be."""
    packed, names = Packed(), dict[int, str]()

    def refuse(path: str, why: str) -> ConfigError:
        return ConfigError(
            f"{type(state).__name__}.{path}: {why} cannot be stored in a checkpoint. Keep arrays, numbers, strings, "
            "lists, dictionaries or dataclasses (of a module's top level) of these."
        )

    def kind(value: Any, path: str) -> str:
        name = f"{type(value).__module__}:{type(value).__qualname__}"
        if "<locals>" in name:
            raise refuse(path, f"the local class {type(value).__name__}")
        return name

    def one(value: Any, path: str) -> Any:
        def parts(inner: Mapping[Any, Any]) -> dict[Any, Any]:
            return {name: one(part, _below(path, name)) for name, part in inner.items()}

        if value is None or isinstance(value, bool | int | float | str | np.generic):
            return value.item() if isinstance(value, np.generic) else value
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
            if names.setdefault(id(value), path) == path:
                if path in packed.arrays:
                    raise refuse(path, "a second array of this name")
                packed.arrays[path] = value
            return {ARRAY: names[id(value)]}
        if is_dataclass(value) and not isinstance(value, type):
            found = parts({part.name: getattr(value, part.name) for part in fields(value)})
            return {CLASS: kind(value, path), **found}
        if isinstance(value, Mapping):
            found = parts(value)
            plain = all(isinstance(name, str) and not name.startswith("$") for name in value)
            return found if plain else {DICT: [[one(name, path), inner] for name, inner in found.items()]}
        if isinstance(value, list | tuple):
            inner = list(parts(dict(enumerate(value))).values())
            named = {CLASS: kind(value, path)} if hasattr(value, "_fields") else {}
            return inner if isinstance(value, list) else {TUPLE: inner, **named}
        if isinstance(value, set | frozenset):
            return {SET: sorted(value)}
        if hasattr(value, "state") and hasattr(value, "restore"):
            return {OBJECT: parts(value.state())}
        raise refuse(path, f"a {type(value).__name__}")

    packed.values = one(state, "")
    return packed


def _below(path: str, name: Any) -> str:
    text = "-".join(map(str, name)) if isinstance(name, tuple) else str(name)
    return f"{path}.{text}" if path else text


def unpack(packed: Packed, fresh: Any) -> Any:
    """Return the state that :func:`pack` packed; a StorageError if it is of another class, or another version of it.

    `fresh` is a new state of that class; the pools in it are loaded and become part of the result.
    """

    def made(name: str, like: Any) -> Any:
        module, _, path = name.partition(":")
        found: Any = sys.modules[module]  # nothing is imported or called but classes of states: a file may be foreign
        for part in path.split("."):
            found = getattr(found, part)
        if not (isinstance(found, type) and (is_dataclass(found) or hasattr(found, "_fields"))):
            raise StorageError(f"{name} is no class of a state.")
        if is_dataclass(like) and type(like) is not found:
            raise StorageError(f"a state of {path}, not of {type(like).__name__}.")
        return found

    def one(value: Any, like: Any = None) -> Any:
        if isinstance(value, list):
            likes = like if isinstance(like, list | tuple) and len(like) == len(value) else [None] * len(value)
            return list(map(one, value, likes))
        if not isinstance(value, dict):
            return value
        if ARRAY in value:
            return packed.arrays[value[ARRAY]]
        if TUPLE in value:
            found = one(value[TUPLE], like)
            return made(value[CLASS], None)(*found) if CLASS in value else tuple(found)
        if SET in value:
            return set(value[SET])
        if OBJECT in value:
            like.restore({name: one(inner) for name, inner in value[OBJECT].items()})
            return like
        if CLASS in value:
            kind = made(value[CLASS], like)
            return kind(**{n: one(inner, getattr(like, n, None)) for n, inner in value.items() if n != CLASS})
        pairs = [(one(name), inner) for name, inner in value[DICT]] if DICT in value else value.items()
        return {name: one(inner, like.get(name) if isinstance(like, Mapping) else None) for name, inner in pairs}

    try:
        return one(packed.values, fresh)
    except (AttributeError, LookupError, TypeError) as error:
        raise StorageError(f"another version of {type(fresh).__name__} wrote this state ({error!r}).") from error


@dataclass
class Average:
    """The average of a method's global models so far (``average=ema`` or ``tail``), and how many are in it.

    It is evaluated, never sent.
    """

    model: Arrays
    count: int


def averaged(settings: AverageSettings, before: Average | None, model: Arrays, number: int, rounds: int) -> Average:
    """Return the average after round `number` of `rounds`, whose global model is `model`; `before` is not changed.

    With G_r the global model after round r: ``ema`` is ``A_1 = G_1``, ``A_r = d A_{r-1} + (1 - d) G_r``; ``tail`` is
    the mean of all G_r with ``r > f rounds``, and G_r itself before; a run made longer begins it anew if it began too
    early for that. Entries that are no floats are the newest ones.
    """
    first = first_late(rounds, settings.average_from)
    if before is None or (settings.average == "tail" and number - before.count < first):  # the mean's first round
        return Average({name: np.array(array) for name, array in model.items()}, 1)
    count = before.count + 1
    share = 1 - settings.average_decay if settings.average == "ema" else 1 / count
    found = {
        name: old + array.dtype.type(share) * (array - old) if array.dtype.kind == "f" else np.array(array)
        for (name, array), old in zip(model.items(), before.model.values())
    }
    return Average(found, count)
