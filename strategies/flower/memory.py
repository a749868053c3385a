"""Saves and restores what a Flower strategy keeps between rounds, so that a resumed run continues where it stopped.

Kept are numbers, texts, None and arrays, Python's and numpy's, and lists, tuples, sets and dicts of these, each with
its kind. What JSON has no kind for is written as ``{"$kind": KIND, "of": ...}``.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.serverapp.strategy import Strategy

from fedcross.strategies.flower.foreign import chain
from fedcross.strategies.pool.layout import Arrays
from fedcross.strategies.round.federation import State

#: Attribute that ``configure_train`` sets anew every round.
SENT = "current_arrays"
#: Kind of an attribute in checkpoints of older versions, which did not store the kind.
KNOWN = {"m_t": "dict", "v_t": "dict", "momentum_vector": "list"}
#: The first key of an object that stands for a value which JSON does not have.
_KIND = "$kind"
#: Containers beside lists and dicts, by the name that stands in a checkpoint.
_CONTAINERS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


class _ForeignError(Exception):
    """A value has a kind that is not kept."""


def snapshot(strategy: Strategy) -> dict[str, Any]:
    """Return a value for each attribute of `strategy`, ``LEVEL/NAME``, that is another one when the attribute changes.

    It shares nothing with the strategy, which may append to its lists.
    """
    return {name: _mark(value) for name, value in _attributes(strategy)}


def remember(strategy: Strategy, fresh: Mapping[str, Any], names: Sequence[str]) -> tuple[State, dict[str, str]]:
    """Return the attributes of `strategy` that hold arrays, and the others that differ from `fresh`.

    Parameters
    ----------
    strategy : Strategy
        The strategy; those inside it are included.
    fresh : mapping
        :func:`snapshot` of the strategy when it was built.
    names : sequence of str
        Names of the arrays that the strategy gets; a list with as many arrays is stored under these names.

    Returns
    -------
    State, dict of str to str
        What is kept; and the type of each attribute that differs from `fresh` too and cannot be kept.
    """
    state, kinds, lost = State(), {}, {}
    for name, value in _attributes(strategy):
        if found := _arrays(value, names):
            kinds[name], entries = found
            state.arrays |= {f"{_label(name)}.{entry}": array for entry, array in entries.items()}
        elif fresh.get(name, ...) != _mark(value):
            inside: Arrays = {}
            try:
                state.values.setdefault("attributes", {})[name] = _encoded(value, inside)
            except _ForeignError as foreign:
                lost[name] = str(foreign)
            else:
                state.arrays |= {f"{_label(name)}.{entry}": array for entry, array in inside.items()}
    if any(KNOWN.get(name) != kind for name, kind in kinds.items()):
        state.values["kinds"] = kinds
    return state, lost


def recall(strategy: Strategy, state: State, names: Sequence[str]) -> None:
    """Set the attributes of `strategy` that :func:`remember` returned for the same `names`."""
    levels = chain(strategy)
    attributes = state.values.get("attributes", {})
    for name, kind in {**KNOWN, **state.values.get("kinds", {})}.items():
        if name not in attributes and (found := _entries(state, name)):
            _set(levels, name, _FROM_ENTRIES[kind](found, names))
    for name, value in attributes.items():
        _set(levels, name, _decoded(value, _entries(state, name)))


def _entries(state: State, name: str) -> Arrays:
    """Return copies of the arrays of an attribute, by entry."""
    start = f"{_label(name)}."
    return {n.removeprefix(start): array.copy() for n, array in state.arrays.items() if n.startswith(start)}


def _in_order(found: dict[str, Any], names: Sequence[str]) -> list[Any]:
    """Return the entries of a list; a checkpoint has its arrays in the order of their names."""
    order = [name for name in names if name in found] or sorted(found, key=int)
    return [found[name] for name in order]


_FROM_ENTRIES: dict[str, Callable[[dict[str, Any], Sequence[str]], Any]] = {
    "array": lambda found, _: found[""],
    "dict": lambda found, _: found,
    "numbered": lambda found, _: {int(entry): array for entry, array in found.items()},
    "list": _in_order,
}


def _arrays(value: Any, names: Sequence[str]) -> tuple[str, dict[str, Any]] | None:
    """Return the kind and the entries of an attribute that is made of arrays; None for others and for empty ones."""
    if _storable(value):
        return "array", {"": value}
    if isinstance(value, list) and value and all(map(_storable, value)):
        called = names if len(names) == len(value) else [str(i) for i in range(len(value))]
        return "list", dict(zip(called, value))
    if isinstance(value, dict) and value and all(map(_storable, value.values())):
        for kind, sort in (("dict", str), ("numbered", int)):
            if all(isinstance(entry, sort) for entry in value):
                return kind, {str(entry): array for entry, array in value.items()}
    return None


def _label(name: str) -> str:
    """Return the prefix of an attribute's arrays in a checkpoint; Flower's own attributes keep their older names."""
    return name if name in KNOWN else f"strategy.{name}"


def _attributes(strategy: Strategy) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a strategy by name, and of those inside it by ``LEVEL/NAME``."""
    for level, one in enumerate(chain(strategy)):
        for name, value in vars(one).items():
            if name != SENT and not isinstance(value, Strategy):
                yield (f"{level}/{name}" if level else name), value


def _set(levels: Sequence[Strategy], name: str, value: Any) -> None:
    level, _, attribute = name.rpartition("/")
    setattr(levels[int(level or 0)], attribute, value)


def _encoded(value: Any, inside: Arrays) -> Any:
    """Return `value` as JSON has it; its arrays are put into `inside`, by number.

    Raises
    ------
    _ForeignError
        If something in it is not kept; the text is its type.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_encoded(one, inside) for one in value]
    if kind is dict:
        if _KIND not in value and all(type(key) is str for key in value):
            return {key: _encoded(one, inside) for key, one in value.items()}
        return {_KIND: "dict", "of": [[_encoded(key, inside), _encoded(one, inside)] for key, one in value.items()]}
    if kind.__name__ in _CONTAINERS and kind is _CONTAINERS[kind.__name__]:
        return {_KIND: kind.__name__, "of": [_encoded(one, inside) for one in value]}
    if isinstance(value, np.generic) and (value.dtype.kind == "U" or _fits(value.dtype)):
        return {_KIND: kind.__name__, "of": value.item()}
    if _storable(value):
        inside[str(len(inside))] = value
        return {_KIND: "array", "of": str(len(inside) - 1)}
    raise _ForeignError(kind.__name__)


def _decoded(value: Any, inside: Arrays) -> Any:
    """Return a new value, of which :func:`_encoded` made `value`."""
    if isinstance(value, list):
        return [_decoded(one, inside) for one in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: _decoded(one, inside) for key, one in value.items()}
    kind, of = value[_KIND], value["of"]
    if kind == "array":
        return inside[of]
    if kind == "dict":
        return {_decoded(key, inside): _decoded(one, inside) for key, one in of}
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](_decoded(one, inside) for one in of)
    return np.dtype(kind).type(of)


def _storable(value: Any) -> bool:
    """Return whether `value` is an array that a checkpoint can hold."""
    return isinstance(value, np.ndarray) and (_fits(value.dtype) or value.dtype == np.complex64)


def _fits(dtype: np.dtype[Any]) -> bool:
    """Return whether a checkpoint can hold numbers of `dtype`."""
    return dtype.kind in "biuf" and dtype.itemsize <= 8


def _mark(value: Any) -> Any:
    """Return something that differs as soon as `value` does; the value itself where nothing better is known."""
    inside: Arrays = {}
    try:
        encoded = _encoded(value, inside)
    except _ForeignError:
        try:
            return pickle.dumps(value)
        except Exception:  # noqa: BLE001 - anybody's object may raise anything
            return id(value), value
    return encoded, {entry: (array.dtype.str, array.shape, array.tobytes()) for entry, array in inside.items()}
