"""FedCross under Flower's classic API, beside the native one."""

import numpy as np
import pytest
from flwr.common import Code, FitRes, GetPropertiesRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import SimpleClientManager
from flwr.server.client_proxy import ClientProxy

import fedcross
from fedcross import ClassicFedCross, FedAvg, FedCross
from fedcross.core.errors import ConfigError, FederationError
from fedcross.engines.grid import LocalGrid
from fedcross.strategies.wire.records import encode
from tests.strategies.test_flower import app

OK = Status(Code.OK, "")
INITIAL = ndarrays_to_parameters([np.zeros(2, np.float32)])


class InMemory(ClientProxy):
    """A client that adds its partition + 1, as the native one in test_flower does; `sent` replaces its reply."""

    def __init__(self, cid, partition=None, sent=None):
        super().__init__(cid)
        self.partition, self.sent = partition, sent

    def get_properties(self, ins, timeout, group_id):
        if self.partition is None:
            return GetPropertiesRes(Status(Code.GET_PROPERTIES_NOT_IMPLEMENTED, ""), {})
        return GetPropertiesRes(OK, {"partition-id": self.partition})

    def fit(self, ins, timeout=None, group_id=None):
        arrays = [array + np.float32(ins.config["client"] + 1) for array in parameters_to_ndarrays(ins.parameters)]
        return self.sent or FitRes(OK, ndarrays_to_parameters(arrays), 4, {"train-loss": 1.0})

    get_parameters = evaluate = reconnect = None


def manager(*clients):
    registered = SimpleClientManager()
    for client in clients:
        registered.register(client)
    return registered


def fit(strategy, clients, number=1):
    """Do one round and return the requests, the new parameters and the metrics."""
    asked = strategy.configure_fit(number, INITIAL, clients)
    parameters, metrics = strategy.aggregate_fit(number, [(p, p.fit(ins)) for p, ins in reversed(asked)], [])
    return asked, parameters_to_ndarrays(parameters)[0], metrics


@pytest.mark.parametrize("selection", ["in_order", "lowest_similarity"])
def test_it_equals_the_native_run_to_the_bit(selection):
    values = {"clients_per_round": 3, "seed": 4, "alpha": 0.9, "selection": selection}
    native = FedCross(**values)
    native.start(LocalGrid(app(), 5, {}), encode({"w": np.zeros(2, np.float32)}), num_rounds=4)
    strategy = ClassicFedCross(FedCross(**values), names=["w"])
    clients = manager(*(InMemory(str(70 + i), partition=4 - i) for i in range(5)))
    for number in range(1, 5):
        _, model, _ = fit(strategy, clients, number)
    assert model.tobytes() == native.driver.global_model()["w"].tobytes()
    assert strategy.strategy.driver.state.pool.rows.tobytes() == native.driver.state.pool.rows.tobytes()


BROKEN = [
    FitRes(OK, ndarrays_to_parameters([np.zeros(3, np.float32)]), 1, {}),
    FitRes(OK, ndarrays_to_parameters([np.zeros(2)]), 1, {}),
    FitRes(OK, ndarrays_to_parameters([np.full(2, np.nan, np.float32)]), 1, {}),
    FitRes(OK, ndarrays_to_parameters([]), 1, {}),
    FitRes(OK, ndarrays_to_parameters([np.zeros(2, np.float32)]), -3, {}),
    FitRes(Status(Code.FIT_NOT_IMPLEMENTED, "no"), ndarrays_to_parameters([np.zeros(2, np.float32)]), 1, {}),
]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_result_counts_as_lost(broken):
    """Clients 0 and 2 add 1 and 3: the mean of their models is 2."""
    strategy = ClassicFedCross(FedAvg(clients_per_round=3))
    _, model, _ = fit(strategy, manager(InMemory("0", 0), InMemory("1", 1, broken), InMemory("2", 2)))
    assert model.tolist() == [2, 2]


def test_the_defence_judges_what_flowers_server_has_collected():
    hostile = FitRes(OK, ndarrays_to_parameters([np.full(2, 1e6, np.float32)]), 4, {})
    strategy = ClassicFedCross(FedAvg(clients_per_round=4, defence={"enabled": True}))
    _, model, _ = fit(strategy, manager(InMemory("0", 0, hostile), *(InMemory(str(i), i) for i in (1, 2, 3))))
    assert 0 < model.max() <= 4
    assert strategy.strategy.driver.report.rejected["quarantined"] == 1


@pytest.mark.parametrize("setting", [{"deadline_s": 5}, {"rounds": 4}, {"reassign": 1}, {"enough_replies": 1}])
def test_a_setting_that_has_no_effect_is_refused(setting):
    with pytest.raises(ConfigError, match=next(iter(setting))):
        ClassicFedCross(FedCross(**setting))
    with pytest.raises(ConfigError, match="native API"):
        ClassicFedCross(fedcross.FedBuff())


def test_clients_without_a_partition_are_numbered_by_their_ids():
    strategy = ClassicFedCross(FedCross(clients_per_round=2, seed=9))
    asked, _, _ = fit(strategy, manager(*(InMemory(cid) for cid in ("9", "10", "11"))))
    assert all(int(proxy.cid) - 9 == ins.config["client"] for proxy, ins in asked)


def test_own_metrics_and_configuration_are_those_of_the_base_class():
    strategy = ClassicFedCross(
        FedCross(clients_per_round=1), on_fit_config_fn=lambda number: {"lr": 0.1 * number},
        fit_metrics_aggregation_fn=lambda pairs: {"examples": sum(n for n, _ in pairs)},
    )  # fmt: skip
    asked, _, metrics = fit(strategy, manager(InMemory("1")))
    assert (asked[0][1].config["lr"], metrics["examples"]) == (0.1, 4)
    assert strategy.configure_evaluate(1, INITIAL, manager()) == []


def test_too_few_clients_and_wrong_names():
    with pytest.raises(FederationError, match="1 clients"):
        fit(ClassicFedCross(FedCross(clients_per_round=2, wait_s=0.01)), manager(InMemory("1")))
    with pytest.raises(FederationError, match="partition"):
        fit(ClassicFedCross(FedCross(clients_per_round=2, wait_s=0.01)), manager(InMemory("1", 0), InMemory("2", 0)))
    with pytest.raises(ConfigError, match="names"):
        fit(ClassicFedCross(FedCross(clients_per_round=1), names=["a", "b"]), manager(InMemory("1")))
