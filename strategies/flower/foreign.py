"""Flower strategies by import path: find and check the class, build it (nested ones too), show it a round's clients."""

from __future__ import annotations

import importlib
import inspect
import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from types import ModuleType, UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np
import torch
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy
from flwr.serverapp.strategy.fedopt import FedOpt

from fedcross.core.errors import nearest
from fedcross.core.randomness import key

#: Arguments of Flower's strategies for sampling clients and reading messages; fedcross sets or does these itself.
OURS = {
    "fraction_train",
    "fraction_evaluate",
    "min_train_nodes",
    "min_evaluate_nodes",
    "min_available_nodes",
    "weighted_by_key",
    "arrayrecord_key",
    "configrecord_key",
    "train_metrics_aggr_fn",
    "evaluate_metrics_aggr_fn",
    "selection_rule",
    "accountant",
}
#: Attributes that decide how many clients a strategy draws and waits for; set so that it takes all drawn clients.
DRAWING = {"fraction_train": 1.0, "min_train_nodes": 1, "min_available_nodes": 1}
#: Argument of Flower's wrappers for differential privacy: how many clients a round has.
SAMPLED = "num_sampled_clients"
#: Aggregators of decision trees, not of arrays.
TREES = (flower.FedXgbBagging, flower.FedXgbCyclic)
#: Strategies whose update starts from the global model that was sent.
OPTIMISERS = (flower.FedAvgM, FedOpt)
#: What fits an annotation: an integer is a number too, and true is 1.
SIMPLE: dict[str, Any] = {"int": Integral, "float": Real, "bool": (bool, Integral), "str": str, "None": type(None)}
CALLED = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a text", "None": "null"}
HOME = "flwr.serverapp.strategy"


def short_names() -> list[str]:
    """Return the names of Flower's strategies that need no import path."""
    kinds = {name: getattr(flower, name) for name in flower.__all__}
    return [
        name
        for name, kind in kinds.items()
        if issubclass(kind, Strategy) and not inspect.isabstract(kind) and not issubclass(kind, TREES)
    ]


def find(path: str) -> type[Strategy]:
    """Return the strategy class at `path`: a short name, ``package.module.Class`` or ``package.module:Class``.

    Raises
    ------
    ValueError
        If it cannot be imported, is not a concrete ``flwr.serverapp.strategy.Strategy``, or cannot be used here.
    """
    name = path if "." in path or ":" in path else f"{HOME}.{path}"
    module_name, _, attribute = name.rpartition(":" if ":" in name else ".")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        told = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{path}: {module_name} cannot be imported ({told}). Is it installed or on PYTHONPATH?"
        ) from error
    kind: Any = getattr(module, attribute, None)
    if fault := _fault(kind, module, attribute):
        raise ValueError(f"{path}: {fault}")
    found: type[Strategy] = kind
    return found


def _fault(kind: Any, module: ModuleType, attribute: str) -> str:
    """Return why `kind`, the `attribute` of `module`, cannot be used; empty if it can."""
    if kind is None:
        classes = [n for n, value in vars(module).items() if isinstance(value, type) and issubclass(value, Strategy)]
        known = short_names() if module is flower else classes
        return f"{module.__name__} has no {attribute}. {nearest(attribute, known)}"
    if not (isinstance(kind, type) and issubclass(kind, Strategy)):
        return "not a subclass of flwr.serverapp.strategy.Strategy (Flower's Message API)"
    if issubclass(kind, TREES):
        return "aggregates decision trees, not arrays"
    if hasattr(kind, "run_round"):
        return "a method of fedcross itself. Choose it with method="
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        return f"does not define {', '.join(missing)}"
    return ""


def build(path: str, arguments: Mapping[str, Any], clients: int) -> Strategy:
    """Return the strategy at `path` with its `arguments`, ready for rounds of `clients` clients.

    An argument that is itself a strategy is given as a path or as ``{strategy: PATH, arguments: {...}}``.
    ``num_sampled_clients`` is `clients` unless given, also where a subclass hands it on as one of its ``**keywords``.

    Raises
    ------
    ValueError
        As :func:`find`; if an argument is unknown or missing (the message lists the known ones); or if the strategy's
        constructor raises an error.
    """
    kind = find(path)
    parameters = inspect.signature(kind).parameters
    own = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = own | {n: p for n, p in _handed_on(kind).items() if n not in own}
    known = [name for name in named if name not in OURS]
    short = kind.__name__
    for name, value in arguments.items():
        if fault := _argument_fault(name, value, named, known, takes_any=takes_any):
            raise ValueError(f"{short} {fault}")
    values = {name: _value(named.get(name), name, value, clients) for name, value in arguments.items()}
    drawn = {SAMPLED: clients} if SAMPLED in named else {}
    if missing := [n for n, p in own.items() if p.default is p.empty and n not in drawn | values]:
        raise ValueError(f"{short} needs {', '.join(missing)}. Known: {', '.join(known)}.")
    try:
        with quiet():
            strategy = _called(kind, drawn | values, optional=SAMPLED not in own and SAMPLED not in values)
    except Exception as error:
        raise ValueError(f"Flower's {short} refuses these options: {error}") from error
    for one in chain(strategy):  # also strategies that another one creates itself
        for name, value in DRAWING.items():
            if hasattr(one, name):
                setattr(one, name, value)
    return strategy


def _handed_on(kind: type[Strategy]) -> dict[str, inspect.Parameter]:
    """Return the named parameters of the constructors to which that of `kind` can hand its ``**keywords`` on."""
    found: dict[str, inspect.Parameter] = {}
    for base in (one for one in kind.__mro__ if "__init__" in vars(one) and one is not object):
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                found.setdefault(parameter.name, parameter)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return found


def _called(kind: type[Strategy], values: Mapping[str, Any], *, optional: bool) -> Strategy:
    """Return ``kind(**values)``; without :data:`SAMPLED` if it is `optional` and the constructor gives its own."""
    try:
        return kind(**values)
    except TypeError as error:
        if not (optional and SAMPLED in values and SAMPLED in str(error)):
            raise
        return kind(**{name: value for name, value in values.items() if name != SAMPLED})


def _argument_fault(
    name: str, value: Any, named: Mapping[str, inspect.Parameter], known: Sequence[str], *, takes_any: bool
) -> str:
    """Return why a strategy cannot be given `value` as its argument `name`; empty if it can."""
    if name in OURS:
        instead = "Write clients_per_round=N" if name in DRAWING else "Leave it out"
        return f"has no option {name!r} here: fedcross sets it. {instead}."
    if name not in known and not takes_any:
        return (
            f"has no option {name!r}. {nearest(name, known) + ' ' if known else ''}Known: {', '.join(known) or 'none'}."
        )
    wanted = _simple(named[name].annotation) if name in named else []
    if not wanted or (value is None and named[name].default is None):
        return ""
    if any(isinstance(value, SIMPLE[kind]) for kind in wanted):
        return ""
    texts = " or ".join(CALLED[kind] for kind in wanted)
    return f"wants {texts} for {name!r}, not {value!r}."


def _simple(annotation: Any) -> list[str]:
    """Return the names of the kinds that an argument may have, if all of them are in :data:`SIMPLE`; else none."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else [annotation]
    names = [getattr(one, "__name__", str(one)) for one in members]
    if isinstance(annotation, str):  # as ``from __future__ import annotations`` leaves it
        names = [one.strip() for one in annotation.split("|")]
    names = ["None" if one == "NoneType" else one for one in names]
    return names if all(one in SIMPLE for one in names) else []


def _value(parameter: inspect.Parameter | None, name: str, value: Any, clients: int) -> Any:
    """Return an argument's value, built if it is a strategy."""
    if isinstance(value, Mapping) and "strategy" in value and set(value) <= {"strategy", "arguments"}:
        return build(str(value["strategy"]), value.get("arguments") or {}, clients)
    wanted = None if parameter is None else parameter.annotation
    if isinstance(value, str) and (name == "strategy" or wanted in (Strategy, "Strategy")):
        return build(value, {}, clients)
    return value


def chain(strategy: Strategy) -> list[Strategy]:
    """Return `strategy` and the strategies inside it, outermost first."""
    found = [strategy]
    for outer in found:
        found += [inner for inner in vars(outer).values() if isinstance(inner, Strategy) and inner not in found]
    return found


def shortfalls(strategy: Strategy, clients: int) -> list[str]:
    """Return why `strategy`, or one inside it, can make nothing of the replies of `clients` clients."""
    found = []
    for one, enough in _counting(strategy):
        called = type(one).__name__
        now = f"{called}: num_malicious_nodes={one.num_malicious_nodes}"
        if one.num_malicious_nodes < 0:
            found.append(f"{now}. Give 0 or more.")
        elif clients < (enough if isinstance(one, flower.Bulyan) else one.num_malicious_nodes + 1):
            found.append(
                f"{now} needs {enough} replies a round, clients_per_round={clients} gives fewer. Lower it, or write "
                f"clients_per_round={enough}."
            )
        if getattr(one, "num_nodes_to_select", 1) < 1:
            found.append(f"{called}: num_nodes_to_select={one.num_nodes_to_select}. Give 1 or more.")
    return found


def thin(strategy: Strategy, clients: int) -> list[str]:
    """Return where `clients` replies are too few for what Krum promises, though Flower takes them."""
    return [
        f"{type(one).__name__}: num_malicious_nodes={one.num_malicious_nodes}, clients_per_round={clients}: what Krum's"
        f" paper promises holds from {enough} replies on."
        for one, enough in _counting(strategy)
        if one.num_malicious_nodes and clients < enough
    ]


def _counting(strategy: Strategy) -> Iterator[tuple[Any, int]]:
    """Yield each strategy that aggregates as Flower's Bulyan or Krum, and the replies that its paper asks for."""
    for one in chain(strategy):
        aggregates: Any = type(one).aggregate_train
        hostile = getattr(one, "num_malicious_nodes", None)
        if isinstance(hostile, int) and aggregates is flower.Bulyan.aggregate_train:
            yield one, 4 * hostile + 3
        elif isinstance(hostile, int) and aggregates is flower.MultiKrum.aggregate_train:
            yield one, 2 * hostile + 3


def is_private(strategy: Strategy) -> bool:
    """Return whether one of Flower's wrappers for differential privacy is in `strategy`."""
    kinds = (kind for one in chain(strategy) for kind in type(one).__mro__)
    return any(kind.__name__.startswith("DifferentialPrivacy") for kind in kinds)


class Drawn(Grid):
    """The grid that a strategy sees when it configures a round: only the clients that were drawn."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes = list(nodes)

    def get_node_ids(self) -> Iterable[int]:
        """Return the drawn clients' node ids."""
        return list(self._nodes)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("A strategy returns its messages from configure_train; fedcross sends them.")

    set_run = create_message = push_messages = pull_messages = send_and_receive = _refuse
    run = property(_refuse)


# ---- its surroundings ---------------------------------------------------------------------------------------------


@contextmanager
def surroundings(seed: int, number: int, purpose: str) -> Iterator[None]:
    """Seed the global random generators from (seed, round, purpose) for a strategy, restore them, and mute its log.

    Flower samples with ``random`` and takes the noise of differential privacy from numpy's global generator.
    """
    drawn = key(seed, purpose, number)
    before, numpys = random.getstate(), np.random.get_state()  # noqa: NPY002 - what Flower draws from
    try:
        random.seed(drawn)
        np.random.seed(drawn % 2**32)  # noqa: NPY002
        with torch.random.fork_rng(devices=[]), quiet():
            torch.default_generator.manual_seed(drawn)
            yield
    finally:
        random.setstate(before)
        np.random.set_state(numpys)  # noqa: NPY002


@contextmanager
def quiet() -> Iterator[None]:
    """Hide Flower's log message for every aggregation; warnings are still logged."""
    logger = logging.getLogger("flwr")
    before = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(before)


def by_node(messages: Iterable[Message], nodes: Iterable[int]) -> dict[int, Message]:
    """Return the messages by their destination node.

    Raises
    ------
    ValueError
        If a node was not drawn or gets two messages.
    """
    allowed, found = set(nodes), dict[int, Message]()
    for message in messages:
        node = message.metadata.dst_node_id
        if node not in allowed or node in found:
            raise ValueError(f"configure_train made a message for node {node}: one for each drawn node at most")
        found[node] = message
    return found
