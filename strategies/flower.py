"""Methods as Flower strategies: ``from fedcross import FedCross`` gives a class that any ServerApp can use.

:func:`strategy_class` makes it from a :class:`strategies.method.Method`. Flower calls ``start``, which
runs all rounds, or ``configure_train`` and ``aggregate_train`` from a loop of its own, which sends the messages.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from logging import INFO
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedcross.core.errors import ConfigError, FederationError, counted
from fedcross.core.settings import parse
from fedcross.strategies.method import Method, Round, Start
from fedcross.strategies.round.driver import Driver
from fedcross.strategies.round.run import open_run
from fedcross.strategies.round.settings import RoundSettings
from fedcross.strategies.wire.records import Arrays, Request, encode

#: Number of rounds of ``start`` if the caller gives none, and Flower's least number of nodes.
FLOWER_ROUNDS, FLOWER_NODES = 3, 2
#: Last part of the names that torch gives to what batch normalisation measures.
STATISTICS = ("running_mean", "running_var")
FRACTION, LEAST, AVAILABLE = "fraction_train", "min_train_nodes", "min_available_nodes"
#: Flower's arguments -> the only value that changes nothing here, and what to do with any other.
ONLY: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("fraction_evaluate", "min_evaluate_nodes"), (0, "the server evaluates: evaluate_fn of start()")),
    "weighted_by_key": ("num-examples", "clients tell num-examples"),
    "arrayrecord_key": ("arrays", "the model is in the record 'arrays'"),
    "configrecord_key": ("config", "the configuration is in the record 'config'"),
    **dict.fromkeys(("train_metrics_aggr_fn", "evaluate_metrics_aggr_fn"), (None, "train-loss alone is averaged")),
}


class FlowerStrategy(Strategy):
    """A method as a strategy of Flower's Message API; `driver` runs its rounds, None before the first one.

    Parameters
    ----------
    **values
        Fields of the method's ``Params`` and of :class:`strategies.round.settings.RoundSettings`, or Flower's
        ``fraction_train``, ``min_train_nodes`` and ``min_available_nodes``.
    """

    Method: ClassVar[type[Method]]

    def __init__(self, **values: Any) -> None:
        faults: list[str] = []
        params = self.Method.Params.model_fields
        self._nodes = {name: values.pop(name) for name in (FRACTION, LEAST) if name in values}
        if AVAILABLE in values:
            values.setdefault("min_clients", values.pop(AVAILABLE))
        for name, (value, advice) in ONLY.items():
            if name in values and name not in params and (given := values.pop(name)) != value:
                faults.append(f"{name}={getattr(given, '__name__', None) or repr(given)}: {advice}. Leave it out.")
        rest = {name: values.pop(name) for name in RoundSettings.model_fields.keys() - params if name in values}
        checked, settings = parse(self.Method.Params, values, "", faults), parse(RoundSettings, rest, "", faults)
        if checked is None or settings is None or faults:
            raise ConfigError([f"{type(self).__name__}: {fault}" for fault in faults])
        self.method, self.settings = self.Method(checked), settings
        self.driver: Driver | None = None
        self._round: Round | None = None  # under way in a loop of the caller, with its first requests
        self._asked: list[tuple[Metadata, Request]] = []

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.method.params})"

    def begin(self, arrays: Arrays, parameters: Collection[str] | None = None, grid: Grid | None = None) -> Driver:
        """Start from the initial model; `parameters` names its trained entries (None: see :func:`trained`)."""
        if self._nodes and grid is not None:
            self.settings = self.settings.model_copy(update={"clients_per_round": self._count(grid)})
        s, names = self.settings, trained(arrays, parameters)
        start = Start(arrays, tuple(n for n in arrays if n in names), s.clients_per_round, s.rounds, s.seed)
        self.driver = open_run(self.method, start, s)
        return self.driver

    def _count(self, grid: Grid) -> int:
        """Return the number of clients of a round, from Flower's fraction of the nodes that are connected now."""
        least = int(self._nodes.get(LEAST, FLOWER_NODES))
        needed, deadline = self.settings.min_clients or least, time.monotonic() + self.settings.wait_s
        while (count := len(list(grid.get_node_ids()))) < needed and time.monotonic() < deadline:
            time.sleep(0.5)
        return max(int(float(self._nodes.get(FRACTION, 1.0)) * count), least, 1)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        should_stop: Callable[..., bool] | None = None,
        *,
        parameters: Collection[str] | None = None,
    ) -> Result:
        """Run global rounds; Flower's own entry point.

        Parameters
        ----------
        num_rounds, timeout : int, float, optional
            Global rounds (``rounds`` if None, else 3), and seconds of an exchange (``deadline_s`` if None).
        train_config, evaluate_config : ConfigRecord, optional
            Sent to the clients with every request; not used.
        evaluate_fn, should_stop : callable, optional
            ``(round, model) -> metrics``, called with the initial model as round 0 and after every round; as in Flower
            1.43, ``(round, result)`` or no arguments: the run ends after a round where it returns true.
        parameters : collection of str, optional
            Names of the trained entries; None: see :func:`trained`.

        A FederationError says that no reply was accepted in any round: nothing was trained.
        """
        if num_rounds is None:
            num_rounds = self.settings.rounds if "rounds" in self.settings.model_fields_set else FLOWER_ROUNDS
        deadline = self.settings.deadline_s if timeout is None else timeout
        self.settings = self.settings.model_copy(update={"deadline_s": deadline, "rounds": num_rounds})
        driver = self.begin({name: array.numpy() for name, array in initial_arrays.items()}, parameters, grid)
        self.summary()
        result, arrays, lost, taken = Result(), initial_arrays, False, False
        takes = len(inspect.signature(should_stop).parameters) if should_stop else 0
        for number in range(num_rounds + 1):
            if number:
                report = driver.run_round(number, grid, dict(train_config or {}))  # type: ignore[arg-type]
                result.arrays = arrays = encode(driver.global_model())
                result.train_metrics_clientapp[number] = metrics_of(driver)
                lost = lost or bool(report.dropped)
                taken = taken or bool(report.bytes_up) or report.train_loss is not None
            measured = evaluate_fn(number, arrays) if evaluate_fn else None
            if measured is not None:
                result.evaluate_metrics_serverapp[number] = measured
            if number or measured:
                log(INFO, "fedcross: round %d of %d: %s", number, num_rounds, _told(driver, number, measured or {}))
            if number and should_stop is not None and should_stop(*(number, result)[:takes]):
                break
        if lost and not taken:  # requests say nothing: a lost slot may have had none, or several
            raise FederationError(
                f"{counted(num_rounds, 'round')} and not one accepted reply: nothing was trained. The warnings above "
                "say why."
            )
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Open an exchange and return its first requests, for a caller that sends them and collects the replies.

        `server_round` counts exchanges; `arrays` counts in the first call only. ``deadline_s``, ``enough_replies``,
        spare clients and repeats count for requests that :meth:`aggregate_train` itself sends.
        """
        if self.method.asynchronous:
            raise FederationError(f"{type(self).__name__} does not wait for whole rounds: call start(grid, arrays).")
        driver = self.driver or self.begin({name: array.numpy() for name, array in arrays.items()}, None, grid)
        driver.ledger.config = dict(config)  # type: ignore[arg-type]
        number, index = divmod(server_round - 1, driver.exchanges)
        begun = self._round if index and self._round is not None else driver.begin(number + 1, grid)
        self._round = replace(begun, exchange=index)
        payloads, spares = driver.prepare(self._round)
        first = driver.exchange.add(self._round, payloads, driver.visit_number(self._round), spares)
        self._asked = [(message.metadata, request) for message, request in first]
        return [message for message, _ in first]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, send lost slots to spare clients, aggregate; return the global model and the metrics."""
        if self._round is None or self.driver is None:
            raise FederationError(f"aggregate_train({server_round}) without configure_train before it")
        first = {metadata.message_id: request for metadata, request in self._asked}
        self.driver.close(self._round, self.driver.exchange.hand_in(first, replies))
        return encode(self.driver.global_model()), metrics_of(self.driver)

    def configure_evaluate(self, *_: Any, **__: Any) -> Iterable[Message]:
        """Return nothing: the global model is evaluated on the server."""
        return []

    def aggregate_evaluate(self, *_: Any, **__: Any) -> MetricRecord | None:
        """Return nothing: the global model is evaluated on the server."""

    def summary(self) -> None:
        """Log the method and its parameters."""
        log(INFO, "\t%s(%s)", type(self).__name__, self.method.params)


@functools.cache
def strategy_class(method: type[Method]) -> type[FlowerStrategy]:
    """Return Flower's strategy of a method, with the signature of its settings."""
    space = {"Method": method, "__doc__": method.__doc__, "__module__": "fedcross"}
    made = type(method.__name__, (FlowerStrategy,), space)
    made.__signature__ = inspect.Signature(arguments_of(method))  # type: ignore[attr-defined]
    return made


def arguments_of(method: type[Method[Any, Any]]) -> list[inspect.Parameter]:
    """Return the settings of a method as arguments, its own first, and those of the rounds."""
    own, body = method.Params.model_fields, vars(method.Params).get("__annotations__", {})
    fields = {name: field for name, field in own.items() if name in body}
    fields |= own | {name: field for name, field in RoundSettings.model_fields.items() if name not in own}
    found, kind = [], inspect.Parameter.KEYWORD_ONLY
    for name, field in fields.items():
        default = field.get_default(call_default_factory=True)
        found.append(inspect.Parameter(name, kind, default=default, annotation=field.annotation))
    return found


def trained(arrays: Mapping[str, Any], parameters: Collection[str] | None = None) -> Collection[str]:
    """Return the names of the trained entries of a ``state_dict``: `parameters`, where they are given.

    Otherwise these are all float entries but the statistics of batch normalisation, by torch's names for them.
    """
    if parameters is None:
        return [n for n, a in arrays.items() if a.dtype.kind == "f" and n.rpartition(".")[2] not in STATISTICS]
    if missing := [name for name in parameters if name not in arrays]:
        raise ConfigError(f"parameters: the initial model has no {missing[0]!r}. It has {', '.join(arrays)}.")
    return [name for name in parameters if arrays[name].dtype.kind == "f"]


def metrics_of(driver: Driver) -> MetricRecord:
    """Return the round's metrics as Flower keeps them."""
    loss = driver.report.train_loss
    return MetricRecord({**({} if loss is None else {"train-loss": loss}), **driver.report.metrics})


def _told(driver: Driver, number: int, measured: Mapping[str, Any]) -> str:
    """Return a round in words: what `evaluate_fn` measured, the clients' loss, how many clients were lost."""
    report = driver.report
    parts = [f"{name} {value:.4g}" for name, value in measured.items() if isinstance(value, int | float)]
    parts += [f"train-loss {report.train_loss:.4g}"] if number and report.train_loss is not None else []
    parts += [f"{report.dropped} of {report.clients} clients lost"] if number and report.dropped else []
    return ", ".join(parts) or "done"
