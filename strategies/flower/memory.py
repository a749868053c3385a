"""Saves and restores what a Flower strategy keeps between rounds, so that a resumed run continues where it stopped.

Kept are numbers, texts, None and arrays, Python's and numpy's, Flower's records of arrays, and lists, tuples, sets and
dicts of these, each with its kind and a dict with its order. What JSON has no kind for is written as
``{"$kind": KIND, "of": ...}``. An array that stands in two places is one array again.
"""

from __future__ import annotations

import collections
import functools
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy
from flwr.serverapp.strategy.fedopt import FedOpt

from fedcross.core.errors import StorageError
from fedcross.strategies.flower.foreign import chain
from fedcross.strategies.pool.layout import Arrays
from fedcross.strategies.round.federation import State

#: Where Flower's strategies keep the arrays that they got.
SENT = "current_arrays"
#: Flower's strategies whose ``configure_train`` sets them anew every round.
SET_ANEW = (
    FedOpt,
    flower.QFedAvg,
    flower.DifferentialPrivacyServerSideFixedClipping,
    flower.DifferentialPrivacyServerSideAdaptiveClipping,
)
#: Kind of an attribute in checkpoints of older versions, which did not store the kind.
KNOWN = {"m_t": "dict", "v_t": "dict", "momentum_vector": "list"}
#: The first key of an object that stands for a value which JSON does not have.
_KIND = "$kind"
#: Containers beside lists and dicts, by the name that stands in a checkpoint.
_CONTAINERS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}
#: What a ``defaultdict`` may make of its own accord to be kept, by name.
_MAKERS: dict[str, Any] = {one.__name__: one for one in (int, float, str, list, dict, set)}
#: Kinds that two attributes share, if both have the same one.
_CHANGEABLE = (list, dict, set, collections.OrderedDict, collections.defaultdict, ArrayRecord)
#: Kinds that keep nothing between rounds and that pickle may refuse.
_STATELESS = (
    FunctionType,
    BuiltinFunctionType,
    MethodType,
    ModuleType,
    type,
    type(threading.Lock()),
    type(threading.RLock()),
)
#: How deep values may lie in each other; a circle is deeper.
_DEEPEST = 60
#: Objects that are looked at inside one that pickle refuses.
_MOST_PARTS = 10_000
#: Python writes integers of up to 640 digits, whatever its limit is.
_MOST_BITS = 2000


class _ForeignError(Exception):
    """A value has a kind that is not kept."""


@dataclass(frozen=True)
class Snapshot:
    """A strategy as it was built.

    Parameters
    ----------
    levels : list of Strategy
        The strategy and those inside it, outermost first.
    marks : dict
        A value for each attribute, ``LEVEL/NAME``, that is another one when the attribute changes. It shares nothing
        with the strategy, which may append to its lists.
    """

    levels: list[Strategy]
    marks: dict[str, Any]


def snapshot(strategy: Strategy) -> Snapshot:
    """Return what :func:`remember` compares `strategy` with later."""
    levels = chain(strategy)
    return Snapshot(levels, {name: _mark(value, levels) for name, value in _attributes(levels)})


def remember(strategy: Strategy, fresh: Snapshot, sent: Arrays) -> tuple[State, dict[str, str]]:
    """Return the attributes of `strategy` that hold arrays, and the others that differ from `fresh`.

    Parameters
    ----------
    strategy : Strategy
        The strategy; those inside it are included.
    fresh : Snapshot
        :func:`snapshot` of the strategy when it was built.
    sent : dict of str to ndarray
        The arrays that the strategy gets next; a list with as many arrays is stored under their names.

    Returns
    -------
    State, dict of str to str
        What is kept; and the type of each attribute that differs from `fresh` too and cannot be kept.
    """
    there = chain(strategy)
    levels = [one if any(one is other for other in there) else None for one in fresh.levels]
    state, lost = State(), dict[str, str]()
    kinds, orders, same = dict[str, str](), dict[str, Any](), dict[str, str]()
    shared, holders = dict[str, str](), dict[int, str]()
    known: dict[int, tuple[str, Any]] = {}  # with the array, for an id may be another one's when it is gone

    def store(name: str, entries: Mapping[str, Any]) -> None:
        for entry, array in entries.items():
            full = f"{_label(name)}.{entry}"
            first, _ = known.setdefault(id(array), (full, array))
            if first != full:
                shared[full] = first
            else:
                state.arrays[full] = array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))

    for name, value in _attributes(levels):
        if name.rpartition("/")[2] == SENT and _set_if_none(fresh.levels[_level(name)]) and _equal(value, sent):
            continue
        if type(value) in _CHANGEABLE and (other := holders.setdefault(id(value), name)) != name:
            (lost if other in lost else same)[name] = lost.get(other, other)
        elif found := _arrays(value, list(sent)):
            kinds[name], entries = found
            store(name, entries)
            keys = list(entries)
            if kinds[name] in ("dict", "numbered") and keys != _sorted(keys, list(sent)):
                orders[name] = keys
        elif fresh.marks.get(name, ...) != _mark(value, fresh.levels):
            inside: Arrays = {}
            try:
                encoded = _encoded(value, inside, fresh.levels)
            except _ForeignError as foreign:
                lost[name] = str(foreign)
            else:
                state.values.setdefault("attributes", {})[name] = encoded
                store(name, inside)
    deleted = [
        name
        for name in fresh.marks
        if (one := levels[_level(name)]) is not None and name.rpartition("/")[2] not in vars(one)
    ]
    if any(KNOWN.get(name) != kind for name, kind in kinds.items()):
        state.values["kinds"] = kinds
    state.values |= {
        key: found
        for key, found in {"orders": orders, "shared": shared, "same": same, "deleted": deleted}.items()
        if found
    }
    return state, lost


def recall(strategy: Strategy, state: State, names: Sequence[str]) -> None:
    """Set the attributes of `strategy` that :func:`remember` returned for arrays of these `names`.

    Raises
    ------
    StorageError
        If `state` has an attribute that `strategy` cannot have.
    """
    levels, values = chain(strategy), state.values
    attributes, kinds, orders = values.get("attributes", {}), values.get("kinds", {}), values.get("orders", {})
    entries = functools.partial(_entries, state, {})
    for name, kind in {**KNOWN, **kinds}.items():
        if name not in attributes and (found := entries(name)):
            order = orders.get(name) or _sorted(list(found), names)
            with _named(name):
                _set(levels, name, _FROM_ENTRIES[kind]({entry: found[entry] for entry in order}))
    for name, value in attributes.items():
        with _named(name):
            _set(levels, name, _decoded(value, entries(name), levels))
    for name, other in values.get("same", {}).items():
        with _named(name):
            _set(levels, name, vars(levels[_level(other)])[other.rpartition("/")[2]])
    for name in values.get("deleted", ()):
        with _named(name):
            vars(levels[_level(name)]).pop(name.rpartition("/")[2], None)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Turn an error about the attribute `name` into a StorageError that names it."""
    try:
        yield
    except Exception as error:  # anybody's attribute may raise anything
        raise StorageError(
            f"the strategy's attribute {name} cannot be restored ({type(error).__name__}: {error}). Is it "
            "another strategy than the run's, or one that makes a strategy inside it only after some rounds?"
        ) from error


def _entries(state: State, copies: Arrays, name: str) -> Arrays:
    """Return copies of the arrays of an attribute, by entry; `copies` has those that exist already."""
    start, shared = f"{_label(name)}.", state.values.get("shared", {})
    found: Arrays = {}
    for full in [*state.arrays, *shared]:
        if full.startswith(start):
            first = shared.get(full, full)
            if first not in copies:
                copies[first] = state.arrays[first].copy()
            found[full.removeprefix(start)] = copies[first]
    return found


def _sorted(entries: list[str], names: Sequence[str]) -> list[str]:
    """Return `entries` in the order of `names` if they are names, or by number or letters; a file has another order."""
    if set(entries) <= set(names):
        return [name for name in names if name in entries]
    return sorted(entries, key=int) if all(map(_is_number, entries)) else sorted(entries)


def _is_number(entry: str) -> bool:
    return entry.removeprefix("-").isdecimal()


_FROM_ENTRIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "array": lambda found: found[""],
    "dict": lambda found: found,
    "numbered": lambda found: {int(entry): array for entry, array in found.items()},
    "list": lambda found: list(found.values()),
}


def _arrays(value: Any, names: Sequence[str]) -> tuple[str, dict[str, Any]] | None:
    """Return the kind and the entries of an attribute that is made of arrays; None for others and for empty ones."""
    if _storable(value):
        return "array", {"": value}
    if type(value) is list and value and all(map(_storable, value)):
        called = names if len(names) == len(value) else [str(i) for i in range(len(value))]
        return "list", dict(zip(called, value))
    if type(value) is dict and value and all(map(_storable, value.values())):
        if all(type(entry) is str for entry in value):
            return "dict", value
        if all(type(entry) is int and entry.bit_length() < _MOST_BITS for entry in value):
            return "numbered", {str(entry): array for entry, array in value.items()}
    return None


def _label(name: str) -> str:
    """Return the prefix of an attribute's arrays in a checkpoint; Flower's own attributes keep their older names."""
    return name if name in KNOWN else f"strategy.{name}"


def _attributes(levels: Sequence[Strategy | None]) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of the first strategy by name, and of the others by ``LEVEL/NAME``."""
    for level, one in enumerate(levels):
        for name, value in vars(one).items() if one is not None else ():
            if name != SENT or not _own_configure(one, SET_ANEW):
                yield (f"{level}/{name}" if level else name), value


def _own_configure(strategy: Any, kinds: Sequence[type[Strategy]]) -> bool:
    """Return whether `strategy` configures a round as one of `kinds` does."""
    return any(type(strategy).configure_train is kind.configure_train for kind in kinds)


def _set_if_none(strategy: Strategy) -> bool:
    """Return whether `strategy` sets :data:`SENT` to what it gets if it is None, as FedAvgM does."""
    return _own_configure(strategy, [flower.FedAvgM])


def _equal(value: Any, sent: Arrays) -> bool:
    """Return whether `value` is a record of the arrays `sent`, to the bit."""
    return (
        type(value) is ArrayRecord
        and list(value) == list(sent)
        and all(_bits(value[name].numpy()) == _bits(array) for name, array in sent.items())
    )


def _bits(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    return array.dtype.str, array.shape, array.tobytes()


def _level(name: str) -> int:
    return int(name.rpartition("/")[0] or 0)


def _set(levels: Sequence[Strategy], name: str, value: Any) -> None:
    setattr(levels[_level(name)], name.rpartition("/")[2], value)


def _encoded(value: Any, inside: Arrays, levels: Sequence[Strategy], depth: int = 0) -> Any:
    """Return `value` as JSON has it; its arrays are put into `inside`, by number.

    Raises
    ------
    _ForeignError
        If something in it is not kept; the text is its type.
    """
    kind = type(value)
    if kind is int and value.bit_length() > _MOST_BITS:
        return {_KIND: "int", "of": hex(value)}
    if value is None or kind in (bool, int, float, str):
        return value
    if depth > _DEEPEST:
        raise _ForeignError(f"{kind.__name__} more than {_DEEPEST} deep")

    def plain(one: Any) -> Any:
        return _encoded(one, inside, levels, depth + 1)

    def pairs(items: Iterable[tuple[Any, Any]]) -> list[Any]:
        return [[plain(key), plain(one)] for key, one in items]

    if kind is list:
        return [plain(one) for one in value]
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: plain(one) for key, one in value.items()}
        return {_KIND: "dict", "of": pairs(value.items())}
    if kind is collections.OrderedDict:
        return {_KIND: kind.__name__, "of": pairs(value.items())}
    if kind is collections.defaultdict and value.default_factory in _MAKERS.values():
        return {_KIND: kind.__name__, "makes": value.default_factory.__name__, "of": pairs(value.items())}
    if kind is ArrayRecord:
        return {_KIND: kind.__name__, "of": [[name, plain(_numpy(array))] for name, array in value.items()]}
    if kind.__name__ in _CONTAINERS and kind is _CONTAINERS[kind.__name__]:
        return {_KIND: kind.__name__, "of": [plain(one) for one in value]}
    if isinstance(value, np.generic) and (value.dtype.kind == "U" or _fits(value.dtype)):
        return {_KIND: kind.__name__, "of": value.item()}
    if _storable(value):
        inside[str(len(inside))] = value
        return {_KIND: "array", "of": str(len(inside) - 1)}
    if not depth and (place := [level for level, one in enumerate(levels) if one is value]):
        return {_KIND: "strategy", "of": place[0]}
    raise _ForeignError(kind.__name__)


def _numpy(array: Array) -> Any:
    """Return the numbers of Flower's `array`, or itself if it has another form than numpy's."""
    try:
        return array.numpy()
    except Exception:  # noqa: BLE001 - it may hold any bytes
        return array


def _decoded(value: Any, inside: Arrays, levels: Sequence[Strategy]) -> Any:
    """Return a new value, of which :func:`_encoded` made `value`."""

    def plain(one: Any) -> Any:
        return _decoded(one, inside, levels)

    if isinstance(value, list):
        return [plain(one) for one in value]
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        return {key: plain(one) for key, one in value.items()}
    kind, of = value[_KIND], value["of"]
    if kind == "array":
        return inside[of]
    if kind == "strategy":
        return levels[of]
    if kind == "int":
        return int(of, 16)
    if kind == "ArrayRecord":
        return ArrayRecord({name: Array(plain(array)) for name, array in of})
    if kind in ("dict", "OrderedDict", "defaultdict"):
        items = {plain(key): plain(one) for key, one in of}
        if kind == "defaultdict":
            return collections.defaultdict(_MAKERS[value["makes"]], items)
        return items if kind == "dict" else collections.OrderedDict(items)
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](plain(one) for one in of)
    return np.dtype(kind).type(of)


def _storable(value: Any) -> bool:
    """Return whether `value` is an array that a checkpoint can hold."""
    return type(value) is np.ndarray and (_fits(value.dtype) or value.dtype == np.complex64)


def _fits(dtype: np.dtype[Any]) -> bool:
    """Return whether a checkpoint can hold numbers of `dtype`."""
    return dtype.kind in "biuf" and dtype.itemsize <= 8


def _mark(value: Any, levels: Sequence[Strategy]) -> Any:
    """Return something that differs as soon as `value` does; what equals nothing where nothing better is known."""
    inside: Arrays = {}
    try:
        encoded = _encoded(value, inside, levels)
    except _ForeignError:
        try:
            return _parts(value, set())
        except Exception:  # noqa: BLE001 - anybody's object may raise anything
            return object()
    return repr(encoded), {entry: _bits(array) for entry, array in inside.items()}


def _parts(value: Any, seen: set[int]) -> Any:
    """Return a mark of what is not kept: pickled, or by its elements or attributes where pickle refuses it."""
    if isinstance(value, _STATELESS) or id(value) in seen:
        return id(value)
    try:
        return pickle.dumps(value)
    except Exception:  # noqa: BLE001 - anybody's object may raise anything
        seen.add(id(value))
    inside: Iterable[Any]
    if isinstance(value, Mapping):
        inside = [part for pair in value.items() for part in pair]
    elif isinstance(value, list | tuple | set | frozenset | collections.deque):
        inside = value
    elif hasattr(value, "__dict__"):
        inside = [part for pair in vars(value).items() for part in pair]
    else:
        return object()
    return type(value).__name__, [_parts(part, seen) if len(seen) < _MOST_PARTS else object() for part in inside]
