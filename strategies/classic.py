"""Methods for Flower's classic API: ``configure_fit`` sends the tasks of a round, ``aggregate_fit`` aggregates."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Mapping, Sequence
from logging import WARNING
from typing import Any

from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.common import Code, FitIns, FitRes, GetPropertiesIns, Parameters, Scalar
from flwr.common import ndarrays_to_parameters as to_parameters
from flwr.common import parameters_to_ndarrays as to_arrays
from flwr.common.logger import log
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg

from fedcross.core.errors import ConfigError, FederationError, UploadError
from fedcross.strategies.flower import FlowerStrategy
from fedcross.strategies.method import Round, Task, Upload
from fedcross.strategies.round.driver import Driver
from fedcross.strategies.round.ledger import RoundReport
from fedcross.strategies.round.nodes import QUERY_WAIT_S
from fedcross.strategies.round.slot import Slot
from fedcross.strategies.wire.records import Spec, check_metrics, decode

#: Options of the classic API for numbers of clients; seconds between two looks at the connected clients.
COUNTS, LOOK_S = {"fraction_fit", "min_fit_clients", "min_available_clients"}, 0.5
#: Settings of the rounds that count under Flower's classic server.
KEPT = frozenset({"seed", "clients_per_round", "min_clients", "wait_s", "min_replies", "defence"})


class ClassicFedCross(FedAvg):
    """A classic strategy around a native one, ``FedCross(alpha=0.99)`` for example; the same seed gives the same model.

    Clients are drawn and ordered by the ``partition-id`` that they report in ``get_properties``, else numbered by their
    client ids. Evaluation, fit configuration and aggregation of metrics are those of the base class.

    Parameters
    ----------
    strategy : FlowerStrategy
        Its method has one exchange a round, and clients send only their models.
    names, parameters : sequence of str, collection of str, optional
        Names of the arrays in a client's list, in the order of the ``state_dict``; None numbers them. Those of them
        that are trained; see :func:`strategies.flower.trained`.
    **options
        Options of Flower's classic ``FedAvg``, but not those for numbers of clients. A ConfigError names an option or a
        setting of the method that can have no effect here.
    """

    def __init__(
        self, strategy: FlowerStrategy, *, names: Sequence[str] | None = None,
        parameters: Collection[str] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        wrong = dict.fromkeys(options.keys() & COUNTS, "the number of clients is the method's: clients_per_round=N")
        for name, setting in type(strategy.settings).model_fields.items():
            if name not in KEPT and getattr(strategy.settings, name) != setting.default:
                wrong[name] = "Flower's server sends the requests and waits: see ServerConfig, and leave it out"
        if strategy.method.asynchronous or strategy.method.objective().sends:
            wrong[type(strategy).__name__] = "it needs more than Flower's classic rounds. Use the native API"
        if wrong:
            raise ConfigError([f"ClassicFedCross: {name}: {why}" for name, why in wrong.items()])
        super().__init__(**{"fraction_evaluate": 0.0, **options})
        self.strategy, self._names, self._trained = strategy, names, parameters
        self._partitions: dict[str, int] = {}
        self._named = False  # whether a client has reported its partition
        self._round = Round(0, 0, (), strategy.settings.seed)
        self._slots: dict[str, Slot] = {}  # by the ids of the clients that train them

    def __repr__(self) -> str:
        return f"ClassicFedCross({self.strategy.method.params})"

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Return a client and its model for every slot of this round; `parameters` counts in the first call only.

        Each client's config holds ``server-round``, ``client`` (the partition id) and ``slot`` too.
        """
        driver = self.strategy.driver or self._begin(parameters)
        online, driver.ledger.report = self._online(client_manager), RoundReport(server_round)
        self._round = driver.draw(server_round, dict.fromkeys(sorted(online), 1.0))
        payloads = driver.payloads(self._round, driver.method.dispatch(driver.state, self._round))
        self._slots = {online[one.task.client].cid: Slot(one, self._round, self._round) for one in payloads}
        shared = self.on_fit_config_fn(server_round) if self.on_fit_config_fn is not None else {}
        requests = []
        for task, model in ((one.task, to_parameters(list(one.arrays.values()))) for one in payloads):
            own: dict[str, Scalar] = {"server-round": server_round, "client": task.client, "slot": task.slot}
            requests.append((online[task.client], FitIns(model, {**shared, **own})))
        return requests

    def _begin(self, parameters: Parameters) -> Driver:
        arrays = to_arrays(parameters)
        names = [f"array-{i}" for i in range(len(arrays))] if self._names is None else list(self._names)
        if len(set(names)) != len(arrays):
            raise ConfigError(f"names: {len(set(names))} names for {len(arrays)} arrays of the initial model.")
        return self.strategy.begin(dict(zip(names, arrays)), self._trained)

    def _online(self, manager: ClientManager) -> dict[int, ClientProxy]:
        """Wait for enough clients and return them by partition id."""
        settings = self.strategy.settings
        deadline = time.monotonic() + settings.wait_s
        while True:
            if len(proxies := dict(manager.all())) >= settings.needed:
                self._number(proxies)
            online = {self._partitions[cid]: proxy for cid, proxy in proxies.items() if cid in self._partitions}
            if len(online) >= settings.needed:
                return online
            if (left := deadline - time.monotonic()) <= 0:
                raise FederationError(
                    f"{len(proxies)} clients are connected after {settings.wait_s:.0f} s, {len(online)} of them with a "
                    f"partition of its own; {settings.needed} are needed. Start more or lower min_clients."
                )
            time.sleep(min(left, LOOK_S))

    def _number(self, proxies: Mapping[str, ClientProxy]) -> None:
        """Ask new clients for their partition ids; number them if none has ever reported one."""
        new = sorted(set(proxies) - set(self._partitions), key=lambda cid: (len(cid), cid))  # numbers by their value
        named = {cid: number for cid in new if (number := _partition(proxies[cid])) is not None}
        self._named = self._named or bool(named)
        self._partitions |= named if self._named else dict(zip(new, itertools.count(len(self._partitions))))

    def aggregate_fit(
        self, server_round: int, results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:  # fmt: skip
        """Check the results, aggregate, and return the global model with the method's metrics."""
        driver = self.strategy.driver
        if driver is None or (failures and not self.accept_failures):
            return None, {}
        accepted: dict[int, FitRes] = {}
        for proxy, result in results:
            try:
                if (slot := self._slots.get(proxy.cid)) is None or slot.upload is not None:
                    raise UploadError("unknown", "not an open request")
                slot.upload = _upload(result, slot.payload.task, driver.start.spec)
                accepted[slot.upload.slot] = result
            except UploadError as error:
                log(WARNING, "fedcross: result of client %s rejected, %s", proxy.cid, error)
        overruled = driver.close(self._round, list(self._slots.values()))
        self._slots = {}
        metrics: dict[str, Scalar] = dict(driver.report.metrics)
        taken = [(r.num_examples, r.metrics) for slot, r in sorted(accepted.items()) if slot not in overruled]
        if self.fit_metrics_aggregation_fn is not None and taken:
            metrics |= self.fit_metrics_aggregation_fn(taken)
        return to_parameters(list(driver.global_model().values())), metrics


def _partition(proxy: ClientProxy) -> int | None:
    """Return the partition id that a client reports; None if it reports none."""
    try:
        answer = proxy.get_properties(GetPropertiesIns({}), QUERY_WAIT_S, None)
    except Exception as error:  # noqa: BLE001 - a client's fault, of whatever kind, is not the server's
        log(WARNING, "fedcross: client %s does not tell its properties, %s", proxy.cid, error)
        return None
    number = answer.properties.get("partition-id") if answer.status.code == Code.OK else None
    return number if isinstance(number, int) and not isinstance(number, bool) and number >= 0 else None


def _upload(result: FitRes, task: Task, spec: Spec) -> Upload:
    """Return what one client sent, checked as the native check does."""
    if result.status.code != Code.OK:
        raise UploadError("client_error", f"{result.status.code}: {result.status.message[-300:]}")
    numbers = {n: v for n, v in result.metrics.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    examples, metrics = check_metrics(MetricRecord({**numbers, "num-examples": result.num_examples}))
    tensors, kind = result.parameters.tensors, result.parameters.tensor_type
    if len(tensors) != len(spec):
        raise UploadError("missing_array", f"{len(tensors)} arrays instead of {len(spec)}")
    declared = {n: Array(dtype, shape, kind, data) for (n, (shape, dtype)), data in zip(spec.items(), tensors)}
    return Upload(task.client, task.slot, decode(ArrayRecord(declared), spec), {}, examples, metrics, task)
