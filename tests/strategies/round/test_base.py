import json
from collections import Counter

import numpy as np
import pytest
from flwr.clientapp import ClientApp

from fedcross.client.app import app as client_app
from fedcross.core.errors import ConfigError, FederationError
from fedcross.core.settings import Settings
from fedcross.strategies.defence.rules import Defence
from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.fedprox import FedProx, FedProxParams
from fedcross.strategies.round.clock import Devices, VirtualClock
from fedcross.strategies.round.cross_training import CrossTraining, CrossTrainingParams
from fedcross.strategies.round.federation import Federation, State
from fedcross.strategies.round.registry import method_class
from fedcross.strategies.round.single_model import SingleModel
from fedcross.strategies.wire.protocol import Round, Upload
from tests.support.federation import run, same, session
from tests.support.virtual import Clock, VirtualGrid, answers, fails


def flaky(broken):
    """Return the client app with faults: `broken(partition, round)` says whether this visit fails."""
    app = ClientApp()

    @app.query()
    def query(message, context):
        return client_app(message, context)

    @app.train()
    def train(message, context):
        asked = message.content.config_records["config"]
        if broken(asked["client"], asked["round"]):
            raise RuntimeError("lost power")
        return client_app(message, context)

    return app


def test_the_draw_depends_on_seed_and_round_only():
    method = FedAvg(clients_per_round=4, seed=3)
    available = list(range(20))
    assert method.sample(5, available) == method.sample(5, available)
    assert method.sample(5, available) != method.sample(6, available)
    assert len(set(method.sample(5, available))) == 4


def test_fewer_clients_than_asked_for_are_all_drawn():
    assert sorted(FedAvg(clients_per_round=4).sample(1, [3, 8])) == [3, 8]


def test_a_lost_client_is_counted_and_the_rest_is_used(tmp_path):
    broken = run(tmp_path / "a", "method=fedavg", "rounds=1", app=flaky(lambda client, number: client == drawn[0]))
    whole = session(tmp_path / "b", "method=fedavg", "rounds=1")
    assert broken.method._report.dropped == 1
    assert broken.method._report.rejected == {"client_error": 1}
    others = {client for client in drawn if client != drawn[0]}
    assert set(broken.method.accepted) == others
    assert not same(broken.method.global_model(), whole.method.global_model())


drawn = FedAvg(clients_per_round=3, seed=1).sample(1, list(range(6)))


def test_a_round_counts_its_requests_reports_who_was_rejected_and_times_both_halves(tmp_path):
    ready = session(tmp_path, "method=fedavg", "rounds=2", app=flaky(lambda client, number: client == drawn[0]))
    told = []
    ready.method.on_rejected = lambda client, error: told.append((client, error.reason))
    ready.execute()
    asked = Counter([*drawn, *ready.method.sample(2, list(range(6)))])
    assert ready.method.requests == asked  # answered or not
    assert told == [(drawn[0], "client_error")] * asked[drawn[0]]
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(line["seconds_training"] > 0 and line["seconds_aggregation"] > 0 for line in lines)


def test_visits_are_numbered_from_1_over_rounds_and_exchanges():
    method = FedAvg()
    assert [method._visit(Round(number, 0, (), 1)) for number in (1, 2, 3)] == [1, 2, 3]
    routed = method_class("fedct")(exchanges=1)
    pairs = [(number, index) for number in (1, 2) for index in range(routed.exchanges)]
    assert [routed._visit(Round(*pair, (), 1)) for pair in pairs] == list(range(1, len(pairs) + 1))


def test_a_model_that_changed_in_place_is_compressed_anew():
    method = FedAvg(compression={"down": "float16"}, clients_per_round=1, nonce=True)
    method.begin({"w": np.ones(2, np.float32)})
    first = method.payloads(Round(1, 0, (0,), 1))[0].arrays["w"].tolist()
    method.model["w"][:] = 3
    again = method.payloads(Round(2, 0, (0,), 1))[0].arrays["w"].tolist()
    assert (first, again) == ([0, 0], [2, 2])  # differences to the initial model


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [({"mu": -1}, "mu"), ({"clients_per_round": 0}, "clients_per_round"), ({"mu": -1, "wait_s": -1}, "mu")],
)
def test_one_wrong_setting_is_enough_for_an_error(wrong, fault):
    with pytest.raises(ConfigError, match=rf"FedProx: .*{fault}"):
        FedProx(**wrong)


@pytest.mark.parametrize("method", ["fedavg", "fedcross"])
def test_a_round_in_which_all_are_lost_changes_nothing(tmp_path, method):
    ready = session(tmp_path, f"method={method}", "rounds=1", app=flaky(lambda client, number: True))
    before = {name: array.copy() for name, array in ready.method.global_model().items()}
    with pytest.raises(FederationError, match="not one accepted reply"):  # and the run does not pass
        ready.execute()
    assert same(ready.method.global_model(), before)
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["clients"], line["dropped"], line["train_loss"]) == (3, 3, None)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedcross"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, method):
    whole = run(tmp_path / "whole", f"method={method}", "rounds=4")
    run(tmp_path / "half", f"method={method}", "rounds=2")
    resumed = run(tmp_path / "half", f"method={method}", "rounds=4", f"resume={tmp_path / 'half'}")
    assert same(whole.method.global_model(), resumed.method.global_model())
    lines = [json.loads(text) for text in (tmp_path / "half" / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4]


def test_resume_keeps_the_runs_identity(tmp_path):
    first = run(tmp_path, "rounds=1")
    assert run(tmp_path, "rounds=2", f"resume={tmp_path}").run == first.run


def test_too_few_clients_end_in_an_error_not_in_waiting(tmp_path):
    ready = session(tmp_path, "rounds=1")
    ready.method.federation = ready.method.federation.model_copy(update={"min_clients": 99, "wait_s": 0.01})
    with pytest.raises(FederationError, match="6 clients are connected after 0 s, 99 are needed"):
        ready.execute()


def test_state_survives_base_and_method_parts():
    method = FedAvg()
    method.begin({"w": np.ones(2, np.float32)})
    method.accepted = {3: 7}
    other = FedAvg()
    other.begin({"w": np.zeros(2, np.float32)})
    saved = method.checkpoint()
    other.resume(State(saved.arrays, json.loads(json.dumps(saved.values))))
    assert other.accepted == {3: 7}
    assert (other.global_model()["w"] == 1).all()


def test_further_names_of_tied_weights_are_stored_if_there_are_any():
    plain, tied, other = FedAvg(), FedAvg(), FedAvg()
    tied.tied = {"out": "in"}
    for method in (plain, tied, other):
        method.begin({"in": np.ones(2, np.float32)})
    assert "_tied" not in plain.checkpoint().values
    other.resume(tied.checkpoint())
    assert other.tied == {"out": "in"}


def test_a_request_says_which_states_its_client_needs(monkeypatch):
    """Visits 1 and 2 were accepted; before round 4 no checkpoint covers them yet."""
    seen = []

    def script(message):
        seen.append(dict(message.content.config_records["config"]))
        return answers(1)(message)

    method = FedAvg(clients_per_round=1, nonce=True, deadline_s=9, run="r")
    method.begin({"w": np.zeros(2, np.float32)})
    grid = VirtualGrid(Clock(monkeypatch), 1, {0: script})
    for number, durable, base in ((1, None, ""), (2, None, "digest"), (4, {}, "")):
        method.durable, method.base = durable, base
        method.run_round(number, grid)
    assert [(one["state"], one["keep"], one["visit"]) for one in seen] == [(0, 0, 1), (1, 1, 2), (2, 0, 4)]
    assert [one.get("base") for one in seen] == [None, "digest", None]


def test_a_round_takes_as_long_as_its_slowest_clients_on_the_virtual_clock(monkeypatch):
    """Both exchanges of a round count; with nobody there is nothing to wait for."""
    method = method_class("fedexg")(exchanges=1, clients_per_round=2, nonce=True, deadline_s=9, run="r")
    method.begin({"classifier.weight": np.zeros((2, 3), np.float32)})
    method.clock = VirtualClock(Devices(training=((5, 0),), communication=((2, 0),)), 1, 2)
    report = method.run_round(1, VirtualGrid(Clock(monkeypatch), 2, {}))
    assert report.metrics["virtual_seconds"] == pytest.approx(14)
    report = method.run_round(2, VirtualGrid(Clock(monkeypatch), 2, dict.fromkeys(range(2), fails(1))))
    assert report.metrics["virtual_seconds"] == pytest.approx(7)


@pytest.mark.parametrize(("host_epochs", "seconds"), [(2, 10), (None, 12)])
def test_measured_seconds_are_those_of_each_exchanges_epochs(monkeypatch, host_epochs, seconds):
    """4 examples, .5 s each: 3 epochs at home are 6 s; at a host 2 are 4 s, and 3 where nothing else is set."""
    method = method_class("fedexg")(host_epochs=host_epochs, clients_per_round=2, nonce=True, run="r")
    method.begin({"classifier.weight": np.zeros((2, 3), np.float32)})
    method.clock = VirtualClock(Devices(seconds_per_example=(0.5,)), 1, 2, [4, 4], 3)
    assert method.run_round(1, VirtualGrid(Clock(monkeypatch), 2, {})).metrics["virtual_seconds"] == seconds


@pytest.mark.parametrize(
    ("name", "compression", "nbytes"),
    [
        ("fedavg", {}, 24 + 24),
        ("fedavg", {"up": "int8"}, 24 + 6 + 4),  # a byte for each value, and one scale
        ("fedavg", {"down": "int8"}, 6 + 4 + 24),
        ("fedavg", {"down": "float16", "up": "int8"}, 12 + 6 + 4),
        ("fednova", {}, 24 + 24 + 8),  # with the number of steps
        ("scaffold", {}, 24 + 24 + 24 + 24),
    ],
)
def test_the_virtual_clock_counts_the_bytes_of_each_direction(monkeypatch, name, compression, nbytes):
    """Six float32 values, one second of work, one byte a second."""
    method = method_class(name)(clients_per_round=1, nonce=True, run="r", compression=compression)
    method.begin({"w": np.ones((2, 3), np.float32)})
    method.clock = VirtualClock(Devices(bytes_per_second=(1.0,)), 1, 1)
    assert method.run_round(1, VirtualGrid(Clock(monkeypatch), 1, {})).metrics["virtual_seconds"] == 1 + nbytes


def test_the_training_loss_is_that_of_the_clients_that_tell_it():
    """(10 * 2 + 30 * 5) / 40 = 4.25, whatever the number of examples of a client that tells none."""
    method, arrays = FedAvg(clients_per_round=3), {"w": np.ones(1, np.float32)}
    method.begin(arrays)
    told = [(10, {"train-loss": 2.0}), (2**40, {}), (30, {"train-loss": 5.0})]
    uploads = [Upload(i, i, arrays, {}, examples, metrics) for i, (examples, metrics) in enumerate(told)]
    method.finish(Round(1, 0, (0, 1, 2), 0), uploads, 3)
    assert method.report.train_loss == 4.25


@pytest.mark.parametrize(
    ("losses", "mean"),
    [
        ((2.0, 1.0, 1e9), 2.0),
        ((2.0, 1.0, -1e9), 2.5 / 3),
        ((-2.0, -1.0, -9.0), -4.0),
        ((2.0, 1.0, 2.5), 5.5 / 3),
        ((0.1, 0.1, 0.1, 0.1, 0.1, 2.0, 2.0, 9.0), 7.5 / 8),
    ],
)
def test_with_the_defence_on_one_device_does_not_decide_the_mean_loss(losses, mean):
    """Of three the second, times 1.5, is the most: (2 + 1 + 3) / 3 and (1.5 + 1 + 0) / 3; of eight the sixth, 2."""
    arrays = {"w": np.ones(1, np.float32)}
    method = FedAvg(clients_per_round=3, defence=Defence(enabled=True, weight=1.5))
    method.begin(arrays)
    method._defend = lambda uploads: uploads
    uploads = [Upload(i, i, arrays, {}, 10, {"train-loss": loss}) for i, loss in enumerate(losses)]
    method.finish(Round(1, 0, (0, 1, 2), 0), uploads, 3)
    assert method.report.train_loss == pytest.approx(mean)


@pytest.mark.parametrize(
    ("kept", "quarantined", "doubted"), [(3, 1, [0]), (2, 1, [0]), (2, 2, []), (1, 1, []), (3, 0, [])]
)
def test_slots_are_doubted_where_the_defence_took_more_of_the_others(kept, quarantined, doubted):
    method, arrays, seen = FedAvg(clients_per_round=kept + quarantined), {"w": np.ones(1, np.float32)}, []
    method.begin(arrays)
    method._overruled = dict.fromkeys(range(quarantined), "quarantined")
    method._defend = lambda uploads: uploads
    method.observer = lambda current, uploads: seen.append(len(uploads))
    uploads = [Upload(i, i, arrays, {}, 1, {}) for i in range(quarantined, quarantined + kept)]
    method.finish(Round(1, 0, tuple(range(kept + quarantined)), 0), uploads, kept + quarantined)
    assert method.doubted == doubted


def test_params_and_federation_fields_can_be_given_by_name():
    method = method_class("fedcross")(alpha=0.9, clients_per_round=5, seed=4)
    assert method.params.alpha.at(1) == 0.9  # type: ignore[attr-defined]
    assert method.federation == Federation(clients_per_round=5, seed=4)


def test_unknown_methods_name_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'fedcross'"):
        method_class("fedcros")
    with pytest.raises(ConfigError, match="no Method class"):
        method_class("wire")


def test_the_class_of_a_methods_parameters_is_what_stands_in_the_brackets():
    class Own(SingleModel[FedProxParams]): ...

    class Nested(SingleModel):
        class Params(Settings):
            scale: float = 2.0

    class Deeper(FedProx): ...

    class Route(CrossTraining): ...

    assert FedProx.Params is Own.Params is Deeper.Params is FedProxParams
    assert Nested().params.scale == 2.0
    assert Own(mu=0.5).params == FedProxParams(mu=0.5)
    assert CrossTraining.Params is Route.Params is CrossTrainingParams
    assert method_class("solo").Params is Settings
