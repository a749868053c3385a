"""Saves and restores what a Flower strategy keeps between rounds, so that a resumed run continues where it stopped."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.serverapp.strategy import Strategy

from fedcross.strategies.flower.foreign import chain
from fedcross.strategies.round.federation import State

#: Attribute that ``configure_train`` sets anew every round.
SENT = "current_arrays"
#: Kind of an attribute in checkpoints of older versions, which did not store the kind.
KNOWN = {"m_t": "dict", "v_t": "dict", "momentum_vector": "list"}


def plain(strategy: Strategy) -> dict[str, Any]:
    """Return the attributes that are numbers or strings, or lists and dicts of these, by ``LEVEL.NAME``."""
    # Copies: a strategy may append to its lists.
    return {name: copy.deepcopy(value) for name, value in _attributes(strategy) if _is_plain(value)}


def remember(strategy: Strategy, fresh: Mapping[str, Any], names: Sequence[str]) -> State:
    """Return the attributes of `strategy` that hold arrays, and the plain ones that differ from `fresh`.

    Parameters
    ----------
    strategy : Strategy
        The strategy; those inside it are included.
    fresh : mapping
        :func:`plain` of the strategy when it was built.
    names : sequence of str
        Names of the arrays that the strategy gets; a list with as many arrays is stored under these names.
    """
    state, kinds = State(), {}
    for name, value in _attributes(strategy):
        if found := _arrays(value, names):
            kinds[name], entries = found
            state.arrays |= {f"{_label(name)}.{entry}": array for entry, array in entries.items()}
        elif _is_plain(value) and fresh.get(name, ...) != value:
            state.values.setdefault("attributes", {})[name] = copy.deepcopy(value)
    if any(KNOWN.get(name) != kind for name, kind in kinds.items()):
        state.values["kinds"] = kinds
    return state


def recall(strategy: Strategy, state: State, names: Sequence[str]) -> None:
    """Set the attributes of `strategy` that :func:`remember` returned for the same `names`."""
    levels = chain(strategy)
    for name, kind in {**KNOWN, **state.values.get("kinds", {})}.items():
        start = f"{_label(name)}."
        found = {n.removeprefix(start): array.copy() for n, array in state.arrays.items() if n.startswith(start)}
        if found:
            _set(levels, name, _FROM_ENTRIES[kind](found, names))
    for name, value in state.values.get("attributes", {}).items():
        _set(levels, name, copy.deepcopy(value))


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
    if isinstance(value, np.ndarray):
        return "array", {"": value}
    if isinstance(value, list) and value and all(isinstance(one, np.ndarray) for one in value):
        called = names if len(names) == len(value) else [str(i) for i in range(len(value))]
        return "list", dict(zip(called, value))
    if isinstance(value, dict) and value and all(isinstance(one, np.ndarray) for one in value.values()):
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
            if name != SENT:
                yield (f"{level}/{name}" if level else name), value


def _set(levels: Sequence[Strategy], name: str, value: Any) -> None:
    level, _, attribute = name.rpartition("/")
    setattr(levels[int(level or 0)], attribute, value)


def _is_plain(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
