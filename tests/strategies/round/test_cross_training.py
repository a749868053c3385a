import json

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp

from fedcross.client.app import app as client_app
from fedcross.client.batched.trainer import train_batched
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import train
from fedcross.client.workshop import Workshop, one_thread
from fedcross.conf.schema import load
from fedcross.core.errors import FederationError
from fedcross.strategies.defence.rules import Defence
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.objective import Visit
from fedcross.strategies.round.cross_training import CrossTraining, Prototypes, average, fuse
from fedcross.strategies.round.registry import method_class
from fedcross.strategies.wire.protocol import Round, Upload
from fedcross.tasks.inputs import Inputs
from tests.support import visits
from tests.support.federation import SMALL, run, same, session

METHODS = ["fedexg", "pgct", "fedct"]


def losing(lost):
    """Return the client app with faults: `lost` holds (client, exchange) pairs that fail."""
    app = ClientApp()

    @app.train()
    def train_or_fail(message, context):
        asked = message.content.config_records["config"]
        if (asked["client"], asked["exchange"]) in lost:
            raise RuntimeError("lost power")
        return client_app(message, context)

    return app


def recorded(method):
    """Return a list that receives (exchange, slot -> (client, examples, arrays)) of every exchange."""
    seen = []
    method.observer = lambda current, uploads: seen.append(
        (current.exchange, {u.slot: (u.client, u.num_examples, u.arrays) for u in uploads})
    )
    return seen


def lines(folder):
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", METHODS)
def test_every_model_is_trained_by_another_client_and_counts_with_its_homes_examples(tmp_path, name):
    ready = session(tmp_path, f"method={name}", "partition=dirichlet", "partition.min_size=5", "rounds=1")
    seen = recorded(ready.method)
    ready.execute()
    (_, home), (_, host) = seen
    assert [exchange for exchange, _ in seen] == [0, 1]
    assert {client for client, _, _ in host.values()} == {client for client, _, _ in home.values()}
    assert all(host[slot][0] != home[slot][0] for slot in home)
    expected = weighted_mean([host[slot][2] for slot in range(3)], [home[slot][1] for slot in range(3)])
    assert same(ready.method.global_model(), expected)
    assert len({examples for _, examples, _ in home.values()}) > 1


@pytest.mark.parametrize("name", METHODS)
def test_the_last_hosts_examples_can_weigh_a_model(tmp_path, name):
    own = ("partition=dirichlet", "partition.min_size=5", "rounds=1", "method.weight=host")
    ready = session(tmp_path, f"method={name}", *own)
    seen = recorded(ready.method)
    ready.execute()
    (_, home), (_, host) = seen
    expected = weighted_mean([host[slot][2] for slot in range(3)], [host[slot][1] for slot in range(3)])
    assert same(ready.method.global_model(), expected)
    assert [home[slot][1] for slot in range(3)] != [host[slot][1] for slot in range(3)]


@pytest.mark.parametrize("name", METHODS)
def test_exchanges_and_bytes_are_counted_apart_from_rounds(tmp_path, name):
    run(tmp_path, f"method={name}", "method.exchanges=2", "rounds=2")
    model, prototypes = 4 * 4810, (0 if name == "fedexg" else 10 * 64 * 4 + 10)
    for line in lines(tmp_path):
        assert (line["exchanges"], line["clients"]) == (3, 9)
        assert line["bytes_down"] == 3 * (3 * model + 2 * prototypes)
        assert line["bytes_up"] == 3 * (3 * model + 2 * prototypes)


def copied(arrays):
    return {name: array.copy() for name, array in arrays.items()}


def two_phases(overrides):
    """Return FedAvg with two phases of local training, written down without any strategy, on the clients of round 1."""
    config = load([*SMALL, *overrides])
    shop = Workshop(config)
    method = method_class("fedexg")(clients_per_round=3, seed=config.seed)
    model = copied(shop.net.read())
    found, examples = [], []
    for client in method.sample(1, list(range(6))):
        arrays = model
        x, y = shop.data.client(client, torch.device("cpu"))
        for exchange in range(2):
            net: ModuleNet = shop.net
            net.load(arrays)
            visit = Visit(
                net, dict(net.params), dict(net.buffers), {}, {}, {}, Inputs(x), y, client, 1, 1, config.seed, 10,
                lr=0.01, exchange=exchange,
            )  # fmt: skip
            with one_thread(torch.device("cpu")):
                train(net, method_class("fedavg").Objective(config.method), visit, {}, config.train)
            arrays = copied(net.read())
        found.append(arrays)
        examples.append(len(y))
    return weighted_mean(found, examples)


@pytest.mark.parametrize(
    "overrides",
    [
        ("method=fedexg",),
        ("method=fedct", "method.kappa=0", "method.eta=0", "method.broadcast=random"),
        ("method=fedct", "method.kappa=0", "method.eta=0"),
        ("method=pgct", "method.kappa=0", "method.eta=0"),
    ],
)
def test_the_identity_route_without_extra_losses_is_two_phases_of_fedavg(tmp_path, monkeypatch, overrides):
    kind = method_class(overrides[0].removeprefix("method="))
    stay_home = lambda self, current: {slot: one.client for slot, one in self.learners.items()}  # noqa: E731
    monkeypatch.setattr(kind, "route", stay_home)
    done = run(tmp_path, "rounds=1", *overrides)
    assert same(done.method.global_model(), two_phases(["rounds=1"]))


def test_the_second_phase_sees_its_own_batches(tmp_path):
    # If phase II drew phase I's shuffles again, one client's order of examples would repeat.
    from fedcross.client.trainer import batches

    x = torch.arange(20).float().unsqueeze(1)
    both = [
        Visit(None, {}, {}, {}, {}, {}, Inputs(x), x[:, 0].long(), 0, 1, 1, 1, 20, 0.1, exchange=e)  # type: ignore[arg-type]
        for e in (0, 1)
    ]
    first, second = ([int(i) for _, y, _ in batches(visit, 1, 5) for i in y] for visit in both)
    assert first != second
    assert sorted(first) == sorted(second) == list(range(20))


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, name):
    settings = (f"method={name}", "method.exchanges=2")
    whole = run(tmp_path / "whole", *settings, "rounds=3")
    run(tmp_path / "part", *settings, "rounds=1")
    resumed = run(tmp_path / "part", *settings, "rounds=3", f"resume={tmp_path / 'part'}")
    assert same(whole.method.global_model(), resumed.method.global_model())


@pytest.mark.parametrize("name", METHODS)
def test_a_client_lost_at_home_takes_no_part_in_the_round(tmp_path, name):
    drawn = method_class(name)(clients_per_round=3, seed=1).sample(1, list(range(6)))
    ready = session(tmp_path, f"method={name}", "rounds=1", app=losing({(drawn[0], 0)}))
    seen = recorded(ready.method)
    ready.execute()
    (_, home), (_, host) = seen
    assert set(home) == {1, 2}
    assert {slot: client for slot, (client, _, _) in host.items()} == {1: drawn[2], 2: drawn[1]}  # two swap
    expected = weighted_mean([host[slot][2] for slot in (1, 2)], [home[slot][1] for slot in (1, 2)])
    assert same(ready.method.global_model(), expected)
    assert (lines(tmp_path)[0]["clients"], lines(tmp_path)[0]["dropped"]) == (5, 1)


@pytest.mark.parametrize("name", METHODS)
def test_a_model_whose_host_is_lost_counts_as_it_left_home(tmp_path, name):
    drawn = method_class(name)(clients_per_round=3, seed=1).sample(1, list(range(6)))
    ready = session(tmp_path, f"method={name}", "rounds=1", app=losing({(drawn[0], 1)}))
    seen = recorded(ready.method)
    ready.execute()
    (_, home), (_, host) = seen
    (lost,) = set(home) - set(host)
    last = {slot: (home if slot == lost else host)[slot][2] for slot in range(3)}
    expected = weighted_mean([last[slot] for slot in range(3)], [home[slot][1] for slot in range(3)])
    assert same(ready.method.global_model(), expected)


@pytest.mark.parametrize("name", METHODS)
def test_with_a_lost_host_further_exchanges_go_on(tmp_path, name):
    drawn = method_class(name)(clients_per_round=3, seed=1).sample(1, list(range(6)))
    app = losing({(drawn[0], 1), (drawn[1], 2)})
    done = run(tmp_path, f"method={name}", "method.exchanges=3", "rounds=1", app=app)
    line = lines(tmp_path)[0]
    assert (line["exchanges"], line["clients"], line["dropped"]) == (4, 12, 2)
    assert all(np.isfinite(a).all() for a in done.method.global_model().values())


@pytest.mark.parametrize("name", METHODS)
def test_when_all_are_lost_at_home_nothing_changes_and_nothing_travels(tmp_path, name):
    ready = session(tmp_path, f"method={name}", "rounds=1", app=losing({(client, 0) for client in range(6)}))
    before = {key: a.copy() for key, a in ready.method.global_model().items()}
    with pytest.raises(FederationError, match="not one accepted reply"):  # and the run does not pass
        ready.execute()
    assert same(ready.method.global_model(), before)
    assert (lines(tmp_path)[0]["exchanges"], lines(tmp_path)[0]["clients"]) == (1, 3)


@pytest.mark.parametrize("name", METHODS)
def test_one_client_has_nobody_to_exchange_with(tmp_path, name):
    done = run(tmp_path / "a", f"method={name}", "clients_per_round=1", "rounds=1")
    fedavg = run(tmp_path / "b", "method=fedavg", "clients_per_round=1", "rounds=1")
    assert same(done.method.global_model(), fedavg.method.global_model())
    assert lines(tmp_path / "a")[0]["exchanges"] == 1


@pytest.mark.parametrize("name", METHODS)
def test_one_client_left_after_phase_one_stays_as_it_is(tmp_path, name):
    drawn = method_class(name)(clients_per_round=3, seed=1).sample(1, list(range(6)))
    ready = session(tmp_path, f"method={name}", "rounds=1", app=losing({(drawn[0], 0), (drawn[2], 0)}))
    seen = recorded(ready.method)
    ready.execute()
    assert same(ready.method.global_model(), seen[0][1][1][2])
    assert lines(tmp_path)[0]["exchanges"] == 1


def test_local_epochs_at_a_host_are_a_setting(tmp_path):
    run(tmp_path / "a", "method=fedexg", "rounds=1", "train.epochs=2", "method.host_epochs=1")
    run(tmp_path / "b", "method=fedexg", "rounds=1", "train.epochs=2", "method.host_epochs=2")
    same_as_b = run(tmp_path / "c", "method=fedexg", "rounds=1", "train.epochs=2")
    a, b = lines(tmp_path / "a")[0], lines(tmp_path / "b")[0]
    assert a["test_loss"] != b["test_loss"]
    assert same_as_b.method.params.host_epochs is None  # type: ignore[attr-defined]
    assert lines(tmp_path / "c")[0]["test_loss"] == b["test_loss"]


@pytest.mark.slow
def test_the_learning_rate_at_a_host_is_a_setting_and_decays(tmp_path):
    def losses(name, *overrides):
        run(tmp_path / name, "method=fedexg", "rounds=2", "train.lr=0.1", "train.lr_decay=0.5", *overrides)
        return [line["test_loss"] for line in lines(tmp_path / name)]

    plain, same_rate, lower = losses("a"), losses("b", "method.host_lr=0.1"), losses("c", "method.host_lr=0.001")
    assert same_rate == plain  # in round 2 too: it decays as train.lr does
    assert lower[0] != plain[0]


def test_random_routes_differ_between_rounds_and_repeat_with_the_seed():
    def route(seed, number):
        method = method_class("fedexg")(clients_per_round=8, seed=seed)
        assert isinstance(method, CrossTraining)
        method.begin({"classifier.weight": np.zeros((2, 2), np.float32)})
        current = Round(number, 1, tuple(range(10, 18)), seed)
        from fedcross.strategies.round.cross_training import Learner

        method.learners = {slot: Learner({}, 1.0, 10 + slot) for slot in range(8)}
        return method.route(current)

    assert route(1, 1) == route(1, 1)
    assert route(1, 1) != route(1, 2)
    assert route(1, 1) != route(2, 1)
    assert all(client != 10 + slot for slot, client in route(1, 1).items())


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize("name", METHODS)
def test_the_batched_trainer_agrees_with_the_loop(name, norm):
    # Hosts of unequal size, prototypes with absent classes; batches of 4 are padded without batch normalisation.
    net = visits.small_net(norm=norm)
    kind = method_class(name)
    objective = kind.Objective(kind.Params())
    generator = np.random.Generator(np.random.Philox(4))
    hosts = []
    for client, (n, present) in enumerate(
        [(9, [True, True, True]), (4, [True, False, True]), (6, [False, True, False])]
    ):
        group = {"vectors": generator.normal(size=(3, 8)), "present": np.array(present)}
        extras = {} if name == "fedexg" else {"prototypes": group}
        hosts.append(visits.visit(net, client, n, exchange=1, extras=extras))
    expected = []
    for one in hosts:
        visits.enter(net, one)
        done = train(net, objective, one, objective.prepare(one), visits.settings())
        expected.append((done.flat.clone(), done.loss))
    assert objective.batchable
    found = train_batched(net, objective, [visits.work(net, objective, one) for one in hosts], visits.settings())
    for (flat, loss), done in zip(expected, found):
        torch.testing.assert_close(done.flat, flat, rtol=0, atol=1e-10)
        assert done.loss == pytest.approx(loss, abs=1e-10)


def test_flowers_own_calls_pass_over_an_exchange_without_messages(tmp_path):
    # One call per exchange; with a single client left there is nothing to send in the second.
    drawn = method_class("fedexg")(clients_per_round=3, seed=1).sample(1, list(range(6)))
    ready = session(tmp_path, "method=fedexg", app=losing({(drawn[0], 0), (drawn[2], 0)}))
    method, config = ready.method, ConfigRecord({})
    for call in (1, 2):
        messages = method.configure_train(call, ArrayRecord({}), config, ready.grid)
        found, _ = method.aggregate_train(call, ready.grid.send_and_receive(messages))
        assert found is not None
    assert len(list(messages)) == 0
    with pytest.raises(FederationError, match="without configure_train"):
        method.aggregate_train(3, [])


def test_prototypes_by_hand():
    """Class 0 is held by both, class 1 by the second, class 2 by none: means; 3/4 of the mean and 1/4 of the own."""
    one = Prototypes(np.float32([[2.0], [9.0], [9.0]]), np.array([True, False, False]))
    two = Prototypes(np.float32([[6.0], [8.0], [9.0]]), np.array([True, True, False]))
    mean = average([one, two])
    assert (mean.vectors.tolist(), mean.present.tolist()) == ([[4], [8], [0]], [True, True, False])
    fused = fuse(mean, one, 0.75)
    assert (fused.vectors.tolist(), fused.present.tolist()) == ([[3.5], [8], [0]], [True, True, False])
    assert fused.vectors.dtype == np.float32


@pytest.mark.parametrize(("clients", "exchanges"), [(1, 1), (2, 3)])
def test_a_single_client_has_nobody_to_send_its_model_to(clients, exchanges):
    assert method_class("fedexg")(clients_per_round=clients, exchanges=2).exchanges == exchanges


def test_the_defence_compares_each_exchange_with_its_own_kind(tmp_path):
    """Visits to hosts change a model by less; where replies were few, their length made all home visits unusual."""
    done = run(tmp_path, "method=fedct", "rounds=1", "defence.enabled=true", "method.host_lr=0.0001")
    assert set(done.method.defender.usual) == {0, 1}
    assert 0 < 3 * max(done.method.defender.usual[1]) < min(done.method.defender.usual[0])


def test_with_the_defence_long_prototypes_are_shortened_and_absent_ones_do_not_count():
    """Longest present vectors 5, 5 and 1e30; three times the usual 5 is the most."""
    method, held = method_class("fedct")(defence=Defence(enabled=True)), np.array([True, False])
    uploads = [
        Upload(i, i, {}, {"prototypes": {"vectors": np.float32([one, [9e9, 0]]), "present": held}}, 1, {})
        for i, one in enumerate(([3, 4], [5, 0], [0, 1e30]))
    ]
    found = method.judge_extras(uploads)
    assert found.clipped == 1
    vectors = [upload.extras["prototypes"]["vectors"][0] for upload in found.uploads]
    assert np.array(vectors) == pytest.approx(np.array([[3, 4], [5, 0], [0, 15]]), rel=1e-6)
    assert method.judge_extras([Upload(0, 0, {}, {}, 1, {})]).clipped == 0


def test_an_absent_prototype_is_zero_whatever_was_sent():
    """A host without any present prototype would attend to them all."""
    sent = {"vectors": np.float32([[3, 4], [9e9, -1]]), "present": np.array([True, False])}
    assert Prototypes.of(sent).vectors.tolist() == [[3, 4], [0, 0]]
    assert Prototypes.of(sent).vectors.dtype == np.float32
