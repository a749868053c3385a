"""FedCross for Flower's classic API: ``configure_fit`` sends one middleware model to each client, ``aggregate_fit``
cross-aggregates. Both call the native class :class:`~strategies.fedcross.FedCross`.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from logging import WARNING
from typing import Any

from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    GetPropertiesIns,
    Parameters,
    Scalar,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.common.logger import log
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import FedAvg

from fedcross.core.errors import ConfigError, FederationError, UploadError
from fedcross.strategies.fedcross import FedCross
from fedcross.strategies.pool.layout import Arrays
from fedcross.strategies.round.flower_hooks import trained
from fedcross.strategies.round.flower_names import classic_faults
from fedcross.strategies.round.guard import check_metrics
from fedcross.strategies.round.nodes import QUERY_WAIT_S
from fedcross.strategies.wire.protocol import Round, Upload
from fedcross.strategies.wire.records import Spec, decode

PARTITION = "partition-id"
#: Seconds until clients that name no partition, where others do, are asked for it again.
ASKED_S = 2.0
#: Federation settings that count under Flower's classic server.
KEPT = frozenset({"seed", "clients_per_round", "min_clients", "wait_s", "min_replies", "defence"})
#: Where one stands that does not, if there is such a place.
UNUSED = {"deadline_s": "Write ServerConfig(round_timeout=...).", "rounds": "Write ServerConfig(num_rounds=...)."}


class ClassicFedCross(FedAvg):
    """A classic strategy around a native :class:`~strategies.fedcross.FedCross`; the same seed gives the same model.

    Clients are drawn and ordered by partition id, which a client reports in ``get_properties`` as ``partition-id``. If
    no client reports one, they are numbered in the order of their client ids. Evaluation, fit configuration and
    aggregation of metrics are those of the base class. A round waits for clients as long as the method's federation
    settings say.

    Parameters
    ----------
    method : FedCross
        Holds the pool and defines the number of clients per round.
    names : sequence of str, optional
        Names of the arrays in a client's list, in the order of the ``state_dict``; None numbers them.
    parameters : collection of str, optional
        Those of `names` that are trained; None is every float array. Batch-normalisation statistics are not trained.
    **options
        Options of Flower's classic ``FedAvg``: ``initial_parameters``, ``evaluate_fn``, ``on_fit_config_fn``,
        ``fraction_evaluate`` (0 unless given), ``accept_failures`` and so on. Its options for the number of clients to
        fit are refused: the method decides it.

    Raises
    ------
    ConfigError
        If an option or a federation setting of the method can have no effect here.
    """

    def __init__(
        self,
        method: FedCross,
        *,
        names: Sequence[str] | None = None,
        parameters: Collection[str] | None = None,
        **options: Any,
    ) -> None:
        faults = classic_faults(options)
        for name, setting in type(method.federation).model_fields.items():
            if name not in KEPT and getattr(method.federation, name) != setting.default:
                why = "has no effect: Flower's server sends the requests and waits for the replies"
                faults.append(f"FedCross({name}=...) {why}. {UNUSED.get(name, 'Leave it out.')}")
        if faults:
            raise ConfigError([f"ClassicFedCross: {fault}" for fault in faults])
        super().__init__(**{"fraction_evaluate": 0.0, **options})
        self.method = method
        self._names = names
        self._trained = parameters
        self._partitions: dict[str, int] = {}
        self._some_name_theirs = False
        self._round = Round(0, 0, (), method.federation.seed)
        self._asked: dict[str, tuple[int, int]] = {}

    def __repr__(self) -> str:
        return f"ClassicFedCross({self.method.params})"

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Return a client and its middleware model for every slot that is sent out this round.

        `parameters` is the initial model in the first call and not used later. Each client's config holds
        ``server-round``, ``client`` (the partition id) and ``slot``, beside the entries from ``on_fit_config_fn``.

        Raises
        ------
        ConfigError
            If `names` does not fit the initial model.
        FederationError
            If too few clients are connected in time.
        """
        if not self.method.spec:
            self._begin(parameters)
        online = self._online(client_manager)
        clients = self.method.sample(server_round, sorted(online))
        self._round = Round(server_round, 0, clients, self.method.federation.seed)
        shared = self.on_fit_config_fn(server_round) if self.on_fit_config_fn is not None else {}
        self._asked, requests = {}, []
        for payload in self.method.payloads(self._round):
            proxy = online[payload.client]
            self._asked[proxy.cid] = (payload.client, payload.slot)
            own: dict[str, Scalar] = {"server-round": server_round, "client": payload.client, "slot": payload.slot}
            model = ndarrays_to_parameters(list(payload.arrays.values()))
            requests.append((proxy, FitIns(model, {**shared, **own})))
        return requests

    def _begin(self, parameters: Parameters) -> None:
        arrays = parameters_to_ndarrays(parameters)
        names = [f"array-{i}" for i in range(len(arrays))] if self._names is None else list(self._names)
        if len(set(names)) != len(arrays):
            raise ConfigError(f"names: {len(set(names))} names for {len(arrays)} arrays of the initial model.")
        initial = dict(zip(names, arrays))
        self.method.begin(initial, trained(initial, self._trained))

    def _online(self, manager: ClientManager) -> dict[int, ClientProxy]:
        """Wait for enough clients and return them by partition id."""
        federation = self.method.federation
        needed = federation.min_clients or federation.clients_per_round
        deadline = time.monotonic() + federation.wait_s
        online: dict[int, ClientProxy] = {}
        while True:
            proxies = dict(manager.all())
            if len(proxies) >= needed:
                self._number(proxies)
                online = {self._partitions[cid]: proxy for cid, proxy in proxies.items() if cid in self._partitions}
            if len(online) >= needed:
                return online
            if (left := deadline - time.monotonic()) <= 0:
                raise FederationError(
                    f"{len(proxies)} clients are connected after {federation.wait_s:.0f} s, {needed} are needed"
                    f"{f', each with a partition of its own: {len(online)} have one' if online else ''}. Start more "
                    "clients, raise wait_s or lower min_clients."
                )
            time.sleep(min(left, ASKED_S if online else 0.2))

    def _number(self, proxies: Mapping[str, ClientProxy]) -> None:
        """Ask new clients for their partition ids; if some report one, leave out the others and ask again later."""
        new = sorted(set(proxies) - set(self._partitions), key=lambda cid: (len(cid), cid))  # numbers by their value
        named = {cid: number for cid in new if (number := _partition(proxies[cid])) is not None}
        self._some_name_theirs = self._some_name_theirs or bool(named)
        first = len(self._partitions)
        self._partitions |= named if self._some_name_theirs else {cid: first + i for i, cid in enumerate(new)}

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Validate the results, cross-aggregate, and return the global model with the pool's metrics.

        An invalid result counts as lost, and one that the defence quarantines: its slot keeps its model.
        """
        if failures and not self.accept_failures:
            return None, {}
        asked = len(self._asked)
        accepted: list[tuple[Upload, FitRes]] = []
        for proxy, result in results:
            try:
                if proxy.cid not in self._asked:
                    raise UploadError("unknown", "not an open request")
                accepted.append((_upload(result, *self._asked.pop(proxy.cid), self.method.spec), result))
            except UploadError as error:
                log(WARNING, "fedcross: result of client %s rejected, %s", proxy.cid, error)
        accepted.sort(key=lambda pair: pair[0].slot)
        taken = {one.slot for one in self.method.finish(self._round, [upload for upload, _ in accepted], asked)}
        metrics: dict[str, Scalar] = dict(self.method.report.metrics)
        if self.fit_metrics_aggregation_fn is not None and taken:
            told = [(result.num_examples, result.metrics) for upload, result in accepted if upload.slot in taken]
            metrics |= self.fit_metrics_aggregation_fn(told)
        return ndarrays_to_parameters(list(self.method.global_model().values())), metrics


def _partition(proxy: ClientProxy) -> int | None:
    """Return the partition id that a client reports; None if it reports none."""
    try:
        answer = proxy.get_properties(GetPropertiesIns({}), QUERY_WAIT_S, None)
    except Exception as error:  # noqa: BLE001 - a client's fault, of whatever kind, is not the server's
        log(WARNING, "fedcross: client %s does not tell its properties, %s", proxy.cid, error)
        return None
    number = answer.properties.get(PARTITION) if answer.status.code == Code.OK else None
    return number if isinstance(number, int) and not isinstance(number, bool) and number >= 0 else None


def _upload(result: FitRes, client: int, slot: int, spec: Spec) -> Upload:
    """Return what one client sent, checked as the native guard does."""
    if result.status.code != Code.OK:
        raise UploadError("client_error", f"{result.status.code}: {result.status.message[-300:]}")
    numbers = {n: v for n, v in result.metrics.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    examples, metrics = check_metrics(MetricRecord({**numbers, "num-examples": result.num_examples}))
    return Upload(client, slot, _arrays(result.parameters, spec), {}, examples, metrics)


def _arrays(parameters: Parameters, spec: Spec) -> Arrays:
    if len(parameters.tensors) != len(spec):
        raise UploadError("missing_array", f"{len(parameters.tensors)} arrays instead of {len(spec)}")
    declared = {
        name: Array(dtype=dtype, shape=shape, stype=parameters.tensor_type, data=data)
        for (name, (shape, dtype)), data in zip(spec.items(), parameters.tensors)
    }
    return decode(ArrayRecord(declared), spec)
