"""Flower strategies by import path: the user's own, wrapped ones, QFedAvg; what is refused and how it says so."""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedcross.client.app import app as client_app
from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError, FederationError
from fedcross.engines.grid import LocalGrid
from fedcross.strategies.flower.foreign import short_names
from fedcross.strategies.flwr import Flwr
from fedcross.strategies.wire.protocol import Round, Upload
from tests.support.federation import run, same
from tests.support.rivals import begin, check_resume, linear, softmax, work

OWN = '''
"""A user's own strategies."""

import random

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, Strategy


class Halfway(Strategy):
    """Half of the way to the plain mean of the replies; counts rounds, remembers who replied and the last step."""

    def __init__(self, share: float = 0.5, names=("a", "b")):
        self.share, self.names, self.rounds, self.seen, self.step, self.per_node = share, names, 0, [], None, {}
        self.current_arrays = None

    def configure_train(self, server_round, arrays, config, grid):
        self.current_arrays = arrays
        config["share"] = self.share
        return [
            Message(RecordDict({"arrays": arrays, "config": config}), dst_node_id=node, message_type=MessageType.TRAIN)
            for node in grid.get_node_ids()
        ]

    def aggregate_train(self, server_round, replies):
        replies = list(replies)
        self.rounds += 1
        self.seen += [reply.metadata.src_node_id for reply in replies]
        made, self.step = {}, []
        for name, old in self.current_arrays.items():
            mean = np.mean([reply.content["arrays"][name].numpy() for reply in replies], axis=0)
            step = (self.share * (mean - old.numpy())).astype(np.float32)
            self.step.append(step)
            made[name] = Array(old.numpy() + step)
        for reply in replies:
            self.per_node[reply.metadata.src_node_id] = np.float32([len(self.seen)])
        return ArrayRecord(made), MetricRecord({"rounds": self.rounds, "train-loss": 1.0})

    def configure_evaluate(self, server_round, arrays, config, grid):
        return []

    def aggregate_evaluate(self, server_round, replies):
        return None

    def summary(self):
        pass


class Choosy(Halfway):
    """Sends to every other node only, and to each the model plus its node id."""

    def configure_train(self, server_round, arrays, config, grid):
        self.current_arrays = arrays
        return [
            Message(
                RecordDict({"arrays": ArrayRecord({n: Array(a.numpy() + node) for n, a in arrays.items()})}),
                dst_node_id=node,
                message_type=MessageType.TRAIN,
            )
            for node in list(grid.get_node_ids())[::2]
        ]


class Stubborn(FedAvg):
    """Hides FedAvg's arguments and would wait for ten nodes."""

    def __init__(self):
        super().__init__(min_train_nodes=10, min_available_nodes=10, fraction_train=0.1)


class Broken(Halfway):
    def aggregate_train(self, server_round, replies):
        raise KeyError("no such thing")


class Renaming(Halfway):
    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        return ArrayRecord({f"x.{name}": array for name, array in arrays.items()}), metrics


class Elsewhere(Halfway):
    def configure_train(self, server_round, arrays, config, grid):
        return [Message(RecordDict({}), dst_node_id=99, message_type=MessageType.TRAIN)]


class Unfinished(Strategy):
    def summary(self):
        pass


class NoStrategy:
    pass
'''
_names = itertools.count()


@pytest.fixture(autouse=True)
def _a_server() -> None:
    """Flower's messages can be made in a server only; a grid makes this process one."""
    LocalGrid(client_app, 1, {})


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The name of an importable module with :data:`OWN`; a new one each time, for settings are remembered."""
    name = f"own_strategies_{next(_names)}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def upload(client: int, w: float, examples: int = 10, loss: float = 1.0, **metrics: float) -> Upload:
    arrays = {"w": np.array([w], np.float32), "steps": np.array(3, np.int64)}
    return Upload(client, client, arrays, {}, examples, {"train-loss": loss, **metrics})


def begun(start: float = 0.0, clients: int = 2, **settings: Any) -> Flwr:
    method = Flwr(clients_per_round=clients, **settings)
    method.begin({"w": np.array([start], np.float32), "steps": np.array(0, np.int64)}, {"w"})
    return method


def one_round(method: Flwr, *uploads: Upload, number: int = 1) -> float:
    current = Round(number, 0, tuple(upload.client for upload in uploads), 0)
    method.dispatch(current)
    method.aggregate(current, list(uploads))
    return float(method.global_model()["w"][0])


# ---- a strategy of the user's own ---------------------------------------------------------------------------------


def test_an_own_strategy_by_hand(own: str) -> None:
    """From 1, mean (3 + 5)/2 = 4, half of the way: 2.5. A quarter of it: 1.75."""
    received = upload(0, 3.0), upload(1, 5.0, examples=1000)
    assert one_round(begun(1.0, strategy=f"{own}:Halfway"), *received) == 2.5
    assert one_round(begun(1.0, strategy=f"{own}.Halfway", arguments={"share": 0.25}), *received) == 1.75


def test_its_configuration_reaches_the_clients_and_its_metrics_the_record(own: str) -> None:
    method = begun(strategy=f"{own}:Halfway", arguments={"share": 0.25})
    current = Round(1, 0, (4, 2), 0)
    payloads = method.dispatch(current)
    assert [(p.client, p.slot, p.config) for p in payloads] == [(4, 0, {"share": 0.25}), (2, 1, {"share": 0.25})]
    found = method.aggregate(current, [upload(4, 3.0), upload(2, 5.0)])
    assert found == {"flower_rounds": 1.0}  # its train-loss is one of the clients' own metrics
    assert method.strategy.seen == [5, 3]  # node ids: partition + 1


def test_it_may_send_each_client_another_model_or_none(own: str) -> None:
    payloads = begun(1.0, strategy=f"{own}:Choosy").dispatch(Round(1, 0, (4, 2, 7), 0))
    assert [(p.client, p.slot, float(p.arrays["w"][0])) for p in payloads] == [(4, 0, 6.0), (7, 2, 9.0)]
    assert payloads[0].arrays["w"].dtype == np.float32
    assert payloads[0].arrays["steps"] == 0


@pytest.mark.slow
def test_a_run_with_an_own_strategy_resumes(tmp_path: Path, own: str) -> None:
    """Counters, texts, lists of arrays and arrays by node are in the checkpoint."""
    check_resume(tmp_path, "method=flwr", f"method.strategy={own}:Halfway", "+method.arguments.share=0.7")
    assert json.loads((tmp_path / "whole" / "result.json").read_text())["method"] == "Halfway"


def test_what_it_remembers_is_restored(own: str) -> None:
    method = begun(strategy=f"{own}:Halfway")
    one_round(method, upload(0, 3.0), upload(1, 5.0))
    state = method.checkpoint()
    again = begun(strategy=f"{own}:Halfway")
    again.resume(state)
    assert (again.strategy.rounds, again.strategy.seen) == (1, [1, 2])
    assert [step.tolist() for step in again.strategy.step] == [[2.0]]
    assert {node: a.tolist() for node, a in again.strategy.per_node.items()} == {1: [2.0], 2: [2.0]}


def test_a_resumed_run_finds_the_kinds_that_it_left(own: str) -> None:
    method, again = begun(strategy=f"{own}:Halfway"), begun(strategy=f"{own}:Halfway")
    method.strategy.share, method.strategy.names, method.strategy.seen = np.float32(0.25), ("c",), {7: 1.5}
    again.resume(method.checkpoint())
    found = again.strategy
    assert (found.share, found.names, found.seen) == (np.float32(0.25), ("c",), {7: 1.5})
    assert type(found.share) is np.float32


def test_many_arrays_in_a_list_come_back_in_their_order(own: str) -> None:
    method = begun(strategy=f"{own}:Halfway")
    method.strategy.step = [np.float32([i]) for i in range(12)]
    state = method.checkpoint()
    state.arrays = dict(sorted(state.arrays.items()))  # as a checkpoint has them
    method.resume(state)
    assert [float(step[0]) for step in method.strategy.step] == list(range(12))


@pytest.mark.parametrize("drawn", [1, 3])
def test_a_strategy_that_would_wait_for_more_clients_takes_those_that_are_there(own: str, drawn: int) -> None:
    method = begun(strategy=f"{own}:Stubborn", clients=drawn)
    assert len(method.dispatch(Round(1, 0, tuple(range(drawn)), 0))) == drawn


# ---- Flower's others ----------------------------------------------------------------------------------------------


def test_short_names_are_flowers_own() -> None:
    assert {"FedAvg", "FedAdam", "QFedAvg", "DifferentialPrivacyServerSideFixedClipping"} <= set(short_names())
    assert not {"Strategy", "Result", "FedXgbBagging"} & set(short_names())


@pytest.mark.parametrize("path", ["flwr.serverapp.strategy.FedAdam", "flwr.serverapp.strategy:FedAdam", "FedAdam"])
def test_a_path_is_the_short_name(path: str) -> None:
    short = one_round(begun(options={"eta": 0.2}, name="FedAdam"), upload(0, 1.0), upload(1, 3.0))
    assert one_round(begun(strategy=path, arguments={"eta": 0.2}), upload(0, 1.0), upload(1, 3.0)) == short != 0


def test_qfedavg_by_hand() -> None:
    """From 0, L = 1/.5 = 2, q = 1. Client k: D = F L (0 - w), h = (L w)^2 + L F; w = -sum D / sum h.

    w 1, F 2: D = -4, h = 4 + 4 = 8. w -1, F .5: D = 1, h = 4 + 1 = 5. w = 3 / 13.
    """
    method = begun(name="QFedAvg", arguments={"q": 1.0, "client_learning_rate": 0.5})
    assert one_round(method, upload(0, 1.0, loss=2.0), upload(1, -1.0, loss=0.5)) == pytest.approx(3 / 13, rel=1e-6)


@pytest.mark.slow
def test_qfedavg_runs(tmp_path: Path) -> None:
    rate = "+method.arguments.client_learning_rate=${train.lr}"
    fair = run(tmp_path / "q", "method=flwr", "method.name=QFedAvg", rate, "+method.arguments.q=1")
    plain = run(tmp_path / "0", "method=flwr", "method.name=QFedAvg", rate, "+method.arguments.q=0")
    assert not same(fair.method.global_model(), plain.method.global_model())


# ---- differential privacy around another strategy -----------------------------------------------------------------

SERVER = "DifferentialPrivacyServerSideFixedClipping"


def test_server_side_clipping_by_hand() -> None:
    """Without noise, from 1, clip 2: updates 10 and 1 become 2 and 1, the mean of equal clients 1 + 1.5."""
    arguments = {"strategy": "FedAvg", "noise_multiplier": 0.0, "clipping_norm": 2.0}
    assert one_round(begun(1.0, name=SERVER, arguments=arguments), upload(0, 11.0), upload(1, 2.0)) == 2.5


def test_the_inner_strategy_has_arguments_of_its_own() -> None:
    """Without clipping in effect the wrapped FedAdam is FedAdam."""
    inner = {"strategy": "flwr.serverapp.strategy.FedAdam", "arguments": {"eta": 0.3}}
    arguments = {"strategy": inner, "noise_multiplier": 0.0, "clipping_norm": 100.0}
    wrapped = begun(1.0, name=SERVER, arguments=arguments)
    alone = begun(1.0, name="FedAdam", arguments={"eta": 0.3})
    for number in (1, 2):
        received = upload(0, 2.0), upload(1, 3.0)
        assert one_round(wrapped, *received, number=number) == one_round(alone, *received, number=number)
    again = begun(1.0, name=SERVER, arguments=arguments)
    again.resume(wrapped.checkpoint())  # Adam's moments, inside the wrapper
    assert one_round(again, upload(0, 2.0), number=3) == one_round(alone, upload(0, 2.0), number=3)


def test_noise_is_that_of_the_seed_and_the_round_and_of_the_clients_drawn() -> None:
    arguments = {"strategy": "FedAvg", "noise_multiplier": 1.0, "clipping_norm": 2.0}
    received = upload(0, 1.0), upload(1, 1.0)
    before = random.getstate(), np.random.get_state()[1].tobytes()  # noqa: NPY002
    first = one_round(begun(name=SERVER, arguments=arguments), *received)
    assert one_round(begun(name=SERVER, arguments=arguments), *received) == first != 1
    assert one_round(begun(name=SERVER, arguments=arguments), *received, number=2) != first
    assert (random.getstate(), np.random.get_state()[1].tobytes()) == before  # noqa: NPY002
    # noise_multiplier * clipping_norm / num_sampled_clients: among more clients each hides better
    crowd = one_round(begun(name=SERVER, arguments=arguments, clients=200), *received)
    assert crowd - 1 == pytest.approx((first - 1) / 100, rel=1e-4)


def test_client_side_clipping_happens_on_the_client() -> None:
    """One client, two steps; its update is brought to length .01 and says that it was longer."""
    arguments = {"strategy": "FedAvg", "noise_multiplier": 0.0, "clipping_norm": 0.01}
    free, clipped = (
        Flwr(clients_per_round=1, **settings)
        for settings in (
            {"name": "FedAvg"},
            {"name": "DifferentialPrivacyClientSideFixedClipping", "arguments": arguments},
        )
    )
    start = np.array([[0.2, 0.0], [-0.1, 0.3]])
    moved = []
    for method in (free, clipped):
        net = begin(method, linear(start[:, :1], start[:, 1]))
        current = Round(1, 0, (0,), 0)
        received = work(method, net, method.dispatch(current)[0], [[1.0], [-1.0]], [0, 1])
        method.aggregate(current, [received])
        made = method.global_model()
        moved.append(np.hstack([made["classifier.weight"], made["classifier.bias"][:, None]]) - start)
    assert np.linalg.norm(moved[0]) > 0.1
    np.testing.assert_allclose(moved[1], moved[0] * 0.01 / np.linalg.norm(moved[0]), rtol=0, atol=1e-12)
    # the first step of the free one, by hand: p - e_y at [1; 1] and [-1; 1]
    slope = sum(
        np.outer(softmax(start @ p) - np.eye(2)[label], p) for p, label in ((np.r_[1, 1.0], 0), (np.r_[-1, 1.0], 1))
    )
    assert (moved[0] * -slope > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        (SERVER, ["+method.arguments.clipping_norm=0.5"]),
        ("DifferentialPrivacyClientSideFixedClipping", ["+method.arguments.clipping_norm=0.5"]),
        ("DifferentialPrivacyServerSideAdaptiveClipping", []),
        ("DifferentialPrivacyClientSideAdaptiveClipping", []),
    ],
)
def test_each_wrapper_runs_and_resumes(tmp_path: Path, name: str, more: list[str]) -> None:
    wrapper = ["+method.arguments.strategy=FedAvgM", "+method.arguments.noise_multiplier=0.01", *more]
    check_resume(tmp_path, "method=flwr", f"method.name={name}", *wrapper)


def test_the_noise_that_is_enough_depends_on_the_clients_of_a_round() -> None:
    """Flower's default deviation is a twentieth of the clients: .5 with 10 is more than .5 / 2, .2 with 4 is not."""
    name = "DifferentialPrivacyClientSideAdaptiveClipping"
    asked = "method=flwr", f"method.name={name}", "+method.arguments.strategy=FedAvg"
    load([*asked, "+method.arguments.noise_multiplier=0.5", "clients_per_round=10"])
    with pytest.raises(ConfigError, match=r"refuses these options: .*This value \(0\.2\) is too low"):
        load([*asked, "+method.arguments.noise_multiplier=0.5", "clients_per_round=4"])


@pytest.mark.parametrize(
    ("name", "arguments", "what"),
    [
        ("QFedAvg", ["client_learning_rate=0.05"], "QFedAvg needs the training loss"),
        (
            SERVER,
            [
                "strategy={strategy: QFedAvg, arguments: {client_learning_rate: 0.05}}",
                "noise_multiplier=0.1",
                "clipping_norm=1",
            ],
            "QFedAvg needs the training loss",
        ),
        (
            "DifferentialPrivacyClientSideAdaptiveClipping",
            ["strategy=FedAvg", "noise_multiplier=0.1"],
            "Clipping needs whether it clipped its update",
        ),
    ],
)
def test_a_strategy_that_needs_what_privacy_keeps_back_is_refused(name: str, arguments: list[str], what: str) -> None:
    asked = "method=flwr", f"method.name={name}", *(f"+method.arguments.{one}" for one in arguments)
    load(asked)
    with pytest.raises(ConfigError, match=f"{what} of each client"):
        load([*asked, "privacy.enabled=true"])
    load(["method=flwr", "method.name=FedAvg", "privacy.enabled=true"])


def test_noise_in_running_statistics_is_refused() -> None:
    method = Flwr(name=SERVER, arguments={"strategy": "FedAvg", "noise_multiplier": 1, "clipping_norm": 1})
    with pytest.raises(ConfigError, match=r"variance is no trained parameter \(batch norm, or frozen\)"):
        method.begin({"w": np.zeros(1, np.float32), "variance": np.ones(1, np.float32)}, {"w"})


# ---- faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"name": "FedNova"}, r"FedNova: flwr\.serverapp\.strategy has no FedNova\."),
        ({"name": "FedAdma"}, "Did you mean 'FedAdam'"),
        ({"strategy": "no_such_package.Mine"}, r"no_such_package cannot be imported \(ModuleNotFoundError.*PYTHONPATH"),
        ({"strategy": "OWN:Halfwya"}, "has no Halfwya. Did you mean 'Halfway'"),
        ({"strategy": "OWN:NoStrategy"}, r"not a subclass of flwr\.serverapp\.strategy\.Strategy"),
        ({"strategy": "flwr.server.strategy.FedAvg"}, r"not a subclass of flwr\.serverapp\.strategy\.Strategy"),
        ({"strategy": "OWN:Unfinished"}, "does not define aggregate_evaluate, aggregate_train, configure_evaluate"),
        ({"strategy": "fedcross.strategies.fedcross.FedCross"}, "a method of fedcross itself"),
        ({"strategy": "flwr.serverapp.strategy.FedXgbBagging"}, "decision trees"),
        ({"strategy": "OWN:Halfway", "arguments": {"shaer": 1}}, "no option 'shaer'.*Known: share, names"),
        ({"strategy": "OWN:Stubborn", "arguments": {"eta": 1}}, "no option 'eta'.*Known: none"),
        ({"name": "FedAvg", "arguments": {"min_train_nodes": 3}}, "no option 'min_train_nodes'"),
        ({"name": "QFedAvg"}, "QFedAvg needs client_learning_rate. Known: client_learning_rate, q"),
        ({"name": SERVER, "arguments": {"strategy": "FedAvg"}}, "needs noise_multiplier, clipping_norm"),
        (
            {"name": SERVER, "arguments": {"strategy": "FedAvgg", "noise_multiplier": 1, "clipping_norm": 1}},
            "Did you mean 'FedAvg'",
        ),
        (
            {"name": SERVER, "arguments": {"strategy": "FedAvg", "noise_multiplier": -1, "clipping_norm": 1}},
            "refuses these options: The noise multiplier should be a non-negative",
        ),
    ],
)
def test_what_is_wrong_with_a_strategy_is_told(own: str, settings: dict[str, Any], fault: str) -> None:
    chosen = {**settings, **({"strategy": settings["strategy"].replace("OWN", own)} if "strategy" in settings else {})}
    with pytest.raises(ConfigError, match=fault):
        Flwr(**chosen)


def test_a_module_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spoiled_strategy.py").write_text("class Mine(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"spoiled_strategy cannot be imported \(SyntaxError"):
        run(tmp_path / "run", "method=flwr", "method.strategy=spoiled_strategy:Mine")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("Broken", "Broken: KeyError in it: 'no such thing'"),
        ("Renaming", "arrays of other names or shapes than it got"),
        ("Elsewhere", "made a message for node 99"),
    ],
)
def test_what_a_strategy_does_wrong_in_a_round_names_it(own: str, name: str, fault: str) -> None:
    with pytest.raises(FederationError, match=fault):
        one_round(begun(strategy=f"{own}:{name}"), upload(0, 1.0))


def test_metrics_that_only_some_clients_send_do_not_stop_flower() -> None:
    """Flower refuses replies with different metrics."""
    assert one_round(begun(name="FedAvg"), upload(0, 1.0, extra=1.0), upload(1, 3.0)) == 2
