"""FedCross under Flower's classic API: by hand with clients in memory, and whole classic apps."""

import re

import numpy as np
import pytest
from flwr.app import Context, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Code, FitRes, GetPropertiesRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.compat.server import ServerAppComponents
from flwr.server import ServerConfig, SimpleClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.server import Server
from flwr.serverapp import ServerApp
from flwr.supercore.run import Run

from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import train
from fedcross.client.visit import examples, learning_rate
from fedcross.client.workshop import Workshop, one_thread
from fedcross.conf.compose import join
from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError, FederationError
from fedcross.engines.grid import LocalGrid
from fedcross.server.session import Session
from fedcross.strategies.classic import ClassicFedCross
from fedcross.strategies.fedcross import FedCross
from fedcross.strategies.parts.objective import Visit
from fedcross.tasks.models import create
from tests.support.federation import SMALL, run, same

OK = Status(Code.OK, "")


class InMemory(ClientProxy):
    """A client that adds 1, 2, ... to what it gets, by its number."""

    def __init__(self, cid, partition=None):
        super().__init__(cid)
        self.partition = partition

    def get_properties(self, ins, timeout, group_id):
        if self.partition is None:
            return GetPropertiesRes(Status(Code.GET_PROPERTIES_NOT_IMPLEMENTED, ""), {})
        return GetPropertiesRes(OK, {"partition-id": self.partition})

    def fit(self, ins, timeout=None, group_id=None):
        arrays = [array + np.float32(ins.config["client"] + 1) for array in parameters_to_ndarrays(ins.parameters)]
        return FitRes(OK, ndarrays_to_parameters(arrays), 5, {"train-loss": 1.0, "name": "x"})

    get_parameters = evaluate = reconnect = None


def manager(*clients):
    registered = SimpleClientManager()
    for client in clients:
        registered.register(client)
    return registered


INITIAL = ndarrays_to_parameters([np.zeros(1, np.float32)])


def fit(strategy, clients, number=1):
    """Do one round and return the requests and the new parameters with the metrics."""
    asked = strategy.configure_fit(number, INITIAL, clients)
    return asked, strategy.aggregate_fit(number, [(proxy, proxy.fit(ins)) for proxy, ins in reversed(asked)], [])


def test_a_round_by_hand():
    # Three clients add 1, 2, 3 by partition; slots are in the order of the draw, so the uploads by slot are a
    # permutation v of 1, 2, 3; in order, alpha .75, round 1: w_i = .75 v_i + .25 v_(i+1). The mean is 2.
    strategy = ClassicFedCross(FedCross(alpha=0.75, selection="in_order", clients_per_round=3, seed=4))
    clients = manager(*(InMemory(str(70 + i), partition=2 - i) for i in range(3)))
    asked, (parameters, metrics) = fit(strategy, clients)
    assert [ins.config["slot"] for _, ins in asked] == [0, 1, 2]
    assert {proxy.cid: ins.config["client"] for proxy, ins in asked} == {"70": 2, "71": 1, "72": 0}
    v = [ins.config["client"] + 1 for _, ins in asked]
    assert strategy.method.pool.rows[:, 0].tolist() == [0.75 * v[i] + 0.25 * v[(i + 1) % 3] for i in range(3)]
    assert parameters_to_ndarrays(parameters)[0].tolist() == [2]
    assert set(metrics) == {"pool_similarity_mean", "pool_spread", "chosen_most", "chosen_models"} | {
        f"chosen_{slot}" for slot in range(3)
    }
    # the second round sends each client a row of its own
    again = strategy.configure_fit(2, parameters, clients)
    sent = [float(parameters_to_ndarrays(ins.parameters)[0][0]) for _, ins in again]
    assert sent == strategy.method.pool.rows[:, 0].tolist()


def test_the_draw_is_the_native_one_and_needs_no_partition_ids():
    native = FedCross(clients_per_round=2, seed=9)
    strategy = ClassicFedCross(FedCross(clients_per_round=2, seed=9))
    clients = manager(*(InMemory(cid) for cid in ("9", "10", "11")))
    for number in (1, 2, 3):
        asked, _ = fit(strategy, clients, number)
        drawn = [int(proxy.cid) - 9 for proxy, _ in asked]  # sorted as numbers: 9, 10, 11
        assert tuple(drawn) == native.sample(number, [0, 1, 2])


def test_a_client_that_joins_later_keeps_everybody_elses_number():
    strategy = ClassicFedCross(FedCross(clients_per_round=2))
    clients = manager(InMemory("5"), InMemory("6"))
    fit(strategy, clients)
    clients.register(InMemory("1"))
    fit(strategy, clients, 2)
    assert strategy._partitions == {"5": 0, "6": 1, "1": 2}


@pytest.mark.parametrize(
    "broken",
    [
        FitRes(OK, ndarrays_to_parameters([np.zeros(2, np.float32)]), 1, {}),
        FitRes(OK, ndarrays_to_parameters([np.zeros(1, np.float64)]), 1, {}),
        FitRes(OK, ndarrays_to_parameters([np.array([np.nan], np.float32)]), 1, {}),
        FitRes(OK, ndarrays_to_parameters([]), 1, {}),
        FitRes(OK, ndarrays_to_parameters([np.zeros(1, np.float32)]), -3, {}),
        FitRes(Status(Code.FIT_NOT_IMPLEMENTED, "no"), ndarrays_to_parameters([np.zeros(1, np.float32)]), 1, {}),
    ],
)
def test_a_broken_result_counts_as_lost(broken):
    strategy = ClassicFedCross(FedCross(alpha=0.75, selection="in_order", clients_per_round=3))
    clients = manager(*(InMemory(str(i)) for i in range(3)))
    asked = strategy.configure_fit(1, INITIAL, clients)
    results = [(proxy, proxy.fit(ins)) for proxy, ins in asked]
    results[1] = (results[1][0], broken)
    v = [ins.config["client"] + 1 for _, ins in asked]
    strategy.aggregate_fit(1, [*results, results[0], (InMemory("99"), results[0][1])], [RuntimeError("lost")])
    expected = [0.75 * v[0] + 0.25 * v[2], 0, 0.75 * v[2] + 0.25 * v[0]]
    assert strategy.method.pool.rows[:, 0].tolist() == expected


class Hostile(InMemory):
    """A client that sends a million."""

    def fit(self, ins, timeout=None, group_id=None):
        return FitRes(OK, ndarrays_to_parameters([np.full(1, 1e6, np.float32)]), 5, {"train-loss": 1.0})


def test_the_defence_judges_what_flowers_server_has_collected():
    """Three clients add 2, 3 and 4, the fourth sends a million: no model is larger than 4."""
    method = FedCross(alpha=0.75, selection="in_order", clients_per_round=4, seed=4, defence={"enabled": True})
    strategy = ClassicFedCross(method, fit_metrics_aggregation_fn=lambda pairs: {"examples": sum(n for n, _ in pairs)})
    _, (_, metrics) = fit(strategy, manager(Hostile("0"), *(InMemory(str(i)) for i in (1, 2, 3))))
    assert 0 < method.pool.rows.max() <= 4
    assert metrics["examples"] == 15  # of those that counted
    assert method.report.rejected["quarantined"] == 1


def test_with_fewer_replies_than_asked_for_no_model_changes():
    strategy = ClassicFedCross(FedCross(clients_per_round=3, min_replies=3, alpha=0.75, selection="in_order"))
    clients = manager(*(InMemory(str(i)) for i in range(3)))
    asked = strategy.configure_fit(1, INITIAL, clients)
    results = [(proxy, proxy.fit(ins)) for proxy, ins in asked]
    assert parameters_to_ndarrays(strategy.aggregate_fit(1, results[:2], [])[0])[0].tolist() == [0]
    assert strategy.method.report.dropped == 3
    assert parameters_to_ndarrays(fit(strategy, clients, 2)[1][0])[0].tolist() == [2]  # the next one counts anew
    assert strategy.method.report.dropped == 0


@pytest.mark.parametrize(
    ("rules", "advice"),
    [
        ({"deadline_s": 5}, r"ServerConfig\(round_timeout=...\)"),
        ({"rounds": 4}, r"ServerConfig\(num_rounds=...\)"),
        ({"reassign": 1}, "Leave it out"),
        ({"hedge": 1}, "Leave it out"),
        ({"enough_replies": 1}, "Leave it out"),
        ({"nonce": True, "compression": {"up": "int8"}}, "Leave it out"),
    ],
)
def test_a_setting_that_flowers_server_leaves_no_room_for_is_refused(rules, advice):
    with pytest.raises(ConfigError) as refused:
        ClassicFedCross(FedCross(clients_per_round=3, **rules))
    for name in rules:
        assert re.search(rf"FedCross\({name}=...\) has no effect.*{advice}", str(refused.value))


def test_statistics_of_batch_normalisation_are_known_by_their_names():
    initial = ndarrays_to_parameters([np.zeros(1, np.float32), np.ones(1, np.float32)])
    method = FedCross(clients_per_round=1)
    ClassicFedCross(method, names=["w", "norm.running_var"]).configure_fit(1, initial, manager(InMemory("1")))
    assert method.parameter_names == ("w",)
    with pytest.raises(ConfigError, match="the initial model has no 'v'"):
        ClassicFedCross(FedCross(clients_per_round=1), names=["w", "u"], parameters=["v"]).configure_fit(
            1, initial, manager(InMemory("1"))
        )


def test_failures_void_the_round_where_they_are_not_accepted():
    strategy = ClassicFedCross(FedCross(clients_per_round=1), accept_failures=False)
    asked = strategy.configure_fit(1, INITIAL, manager(InMemory("1")))
    assert strategy.aggregate_fit(1, [(asked[0][0], asked[0][0].fit(asked[0][1]))], [RuntimeError()]) == (None, {})


def test_own_metrics_and_configuration_are_the_base_class_s():
    strategy = ClassicFedCross(
        FedCross(clients_per_round=1),
        fit_metrics_aggregation_fn=lambda pairs: {"examples": sum(n for n, _ in pairs)},
        on_fit_config_fn=lambda number: {"lr": 0.1 * number},
        evaluate_fn=lambda number, arrays, config: (float(arrays[0][0]), {}),
    )
    asked, (parameters, metrics) = fit(strategy, manager(InMemory("1")))
    assert asked[0][1].config["lr"] == 0.1
    assert metrics["examples"] == 5
    assert strategy.evaluate(1, parameters) == (1.0, {})
    assert strategy.configure_evaluate(1, parameters, manager()) == []


@pytest.mark.parametrize("partitions", [(0, 0, 1, 1), (0, None, None, 1)], ids=["shared", "unnamed"])
def test_clients_without_a_partition_of_their_own_are_not_counted(partitions):
    """Else a round trains fewer models than it has, and nobody says so."""
    clients = manager(*(InMemory(str(i), partition) for i, partition in enumerate(partitions)))
    strategy = ClassicFedCross(FedCross(clients_per_round=3, wait_s=0.01))
    with pytest.raises(FederationError, match=r"4 clients are connected after 0 s, 3 are needed, each with .*: 2 have"):
        strategy.configure_fit(1, ndarrays_to_parameters([np.zeros(2, np.float32)]), clients)
    strategy = ClassicFedCross(FedCross(clients_per_round=3, min_clients=2, wait_s=0.01))
    assert len(strategy.configure_fit(1, ndarrays_to_parameters([np.zeros(2, np.float32)]), clients)) == 2


def test_too_few_clients_and_wrong_names_are_told():
    with pytest.raises(FederationError, match="1 clients are connected"):
        ClassicFedCross(FedCross(clients_per_round=2, wait_s=0.01)).configure_fit(1, INITIAL, manager(InMemory("1")))
    with pytest.raises(ConfigError, match="2 names for 1 arrays"):
        ClassicFedCross(FedCross(clients_per_round=1), names=["a", "b"]).configure_fit(
            1, INITIAL, manager(InMemory("1"))
        )


# ---- a whole classic app on digits, beside the native run ----------------------------------------------------------


class Digits(NumPyClient):
    """A classic client that trains as fedcross' own does."""

    def __init__(self, overrides, partition):
        self.shop = Workshop(load(overrides))
        self.partition = partition

    def get_properties(self, config):
        return {"partition-id": self.partition}

    def fit(self, parameters, config):
        shop, number = self.shop, int(config["server-round"])
        net: ModuleNet = shop.net
        net.load(dict(zip(net.names, parameters)))
        x, y = examples(shop, self.partition, number)
        visit = Visit(
            net, dict(net.params), dict(net.buffers), {}, config, {}, x, y, client=self.partition, round=number,
            rounds=shop.config.rounds, seed=shop.config.seed, classes=10, lr=learning_rate(shop.config.train, number),
        )  # fmt: skip
        with one_thread(net.device):
            train(net, shop.objective, visit, shop.objective.prepare(visit), shop.config.train)
        return list(net.read().values()), len(y), {}


def classic(overrides, method):
    """Run a classic app of three rounds and return its strategy and the history of the global model."""
    config = load(overrides)
    model = create("mlp", config.model, Workshop(config).data.task, config.seed)
    arrays = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    seen = {}
    strategy = ClassicFedCross(
        method,
        names=list(arrays),
        initial_parameters=ndarrays_to_parameters(list(arrays.values())),
        evaluate_fn=lambda number, models, _: seen.update({number: models}) or (0.0, {}),
    )

    def server_fn(context):
        server = Server(client_manager=SimpleClientManager(), strategy=strategy)
        server.set_max_workers(1)
        return ServerAppComponents(server=server, config=ServerConfig(num_rounds=3))

    client = ClientApp(
        client_fn=lambda context: Digits(overrides, int(context.node_config["partition-id"])).to_client()
    )
    grid = LocalGrid(client, config.partition.clients, {"overrides": join(overrides)})
    grid.set_run(Run.create_empty(1))
    ServerApp(server_fn=server_fn)(grid, Context(1, 1, {}, RecordDict(), {}))
    return strategy, {number: dict(zip(arrays, models)) for number, models in seen.items()}


@pytest.mark.slow
@pytest.mark.parametrize("options", [("method.selection=in_order", "method.alpha=0.9"), ("method.k=4",)])
def test_a_classic_app_on_digits_equals_the_native_run_to_the_bit(tmp_path, options):
    overrides = [*SMALL, *options]
    native: Session = run(tmp_path, *options)
    config = load(overrides)
    strategy, seen = classic(overrides, FedCross(config.method, clients_per_round=3, seed=config.seed))
    assert sorted(seen) == [0, 1, 2, 3]
    assert same(seen[3], native.method.global_model())
    assert (strategy.method.pool.rows == native.method.pool.rows).all()
    assert not same(seen[3], seen[2])
