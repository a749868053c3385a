"""A strategy of Flower's Message API as an object: made from its import path, stored in a checkpoint."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from fedcross.core.errors import ConfigError, StorageError, nearest
from fedcross.strategies.wire.records import encode

#: Attributes that decide how many clients a strategy draws and waits for; set so that it takes all drawn clients.
DRAWING = {"fraction_train": 1.0, "min_train_nodes": 1, "min_available_nodes": 1}
SAMPLED = "num_sampled_clients"  # of wrappers for differential privacy: how many clients a round has
NEITHER = (Strategy, flower.FedXgbBagging, flower.FedXgbCyclic)  # no strategies for networks
#: Marks the arrays of an ArrayRecord in a checkpoint.
RECORD = "record"


def built(path: str, arguments: Mapping[str, Any], clients: int) -> Strategy:
    """Return the strategy at `path` with its `arguments`, ready for rounds of `clients` clients."""
    given = dict(arguments)
    for name, value in arguments.items():
        inner: Any = {"strategy": value} if name == "strategy" and isinstance(value, str) else value
        if isinstance(inner, Mapping) and "strategy" in inner:
            given[name] = built(str(inner["strategy"]), inner.get("arguments") or {}, clients)
    dotted = path if "." in path or ":" in path else f"{flower.__name__}.{path}"
    module, _, attribute = dotted.rpartition(":" if ":" in dotted else ".")
    try:
        kind: Any = getattr(importlib.import_module(module), attribute, None)
        if not (isinstance(kind, type) and issubclass(kind, Strategy)) or kind in NEITHER:
            raise ConfigError(f"method: {path}: no strategy of Flower's Message API. {nearest(path, flower.__all__)}")
        takes = {name for one in kind.__mro__[:-1] for name in inspect.signature(one).parameters}
        if wrong := [name for name in given if name in DRAWING or name not in takes]:
            raise ConfigError(f"method: {path} has no argument {wrong[0]!r} here. Known: {', '.join(sorted(takes))}.")
        made: Strategy = kind(**({SAMPLED: clients} if SAMPLED in takes else {}) | given)
    except ConfigError:
        raise
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(f"method: {path}: {type(error).__name__}: {error}") from error
    vars(made).update({name: value for name, value in DRAWING.items() if name in vars(made)})
    return made


class Foreign:
    """A Flower strategy and those inside it, outermost first; a checkpoint holds their arrays, numbers and texts."""

    def __init__(self, strategy: Strategy) -> None:
        self.chain: list[Any] = [strategy]
        for outer in self.chain:
            self.chain += [one for one in vars(outer).values() if isinstance(one, Strategy) and one not in self.chain]

    def state(self) -> dict[str, Any]:
        """Return the attributes by level and name, and as ``lost`` the names of those that a checkpoint cannot hold."""
        found: dict[str, Any] = {"lost": []}
        for level, name, value in ((i, *item) for i, one in enumerate(self.chain) for item in vars(one).items()):
            if isinstance(value, ArrayRecord):
                found[f"{level}-{name}"] = {RECORD: {str(n): array.numpy() for n, array in value.items()}}
            elif _storable(value):
                found[f"{level}-{name}"] = value
            elif not (callable(value) or isinstance(value, Strategy)):
                found["lost"].append(name)
        return found

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state` returned; a StorageError if it is not the whole state."""
        if state["lost"]:
            raise StorageError(f"the strategy keeps {', '.join(state['lost'])}, which no checkpoint holds.")
        for place, value in ((place.split("-"), value) for place, value in state.items() if place != "lost"):
            record = isinstance(value, dict) and set(value) == {RECORD}
            setattr(self.chain[int(place[0])], place[1], encode(value[RECORD]) if record else value)


def _storable(value: Any) -> bool:
    """Return whether a checkpoint holds `value`: arrays, numbers, texts, and lists and dicts of these."""
    if isinstance(value, list | tuple | dict):
        return all(map(_storable, [*value, *value.values()] if isinstance(value, dict) else value))
    return value is None or isinstance(value, bool | int | float | str | np.ndarray | np.generic)
