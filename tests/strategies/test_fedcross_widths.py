"""FedCross with models of several widths, through whole rounds: devices, guard, compression, resume, export."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from safetensors.numpy import load_file

from fedcross.client.app import app as client_app
from fedcross.client.app import device_width
from fedcross.conf.cross_checks import remarks
from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError, StorageError
from fedcross.server.commands.export import export, network
from fedcross.server.launch import launch
from fedcross.server.slices import check_run
from fedcross.strategies.fedcross import FedCross, FedCrossParams
from fedcross.strategies.parts.widths import asked
from fedcross.strategies.wire.protocol import Round
from fedcross.tasks.models.slicing import FULL, Size
from tests.strategies.pool.test_sliced import PLAN, full
from tests.support.command import subcommand
from tests.support.federation import SMALL, run, same, session
from tests.support.slices import POOL, THREE

export_command = subcommand("export")
FULL_POOL = (*THREE[:2], "train.lr=0.1", "method=fedcross", "method.alpha=0.9")


def metrics(ready):
    return [json.loads(line) for line in (ready.folder / "metrics.jsonl").read_text().splitlines()]


def widths_of(session):
    """Each request of the session: (round, slot, client, width)."""
    seen = []
    original = session.method._request

    def watched(current, payload, config, seconds):
        seen.append((current.number, payload.slot, payload.client, asked(payload.config)))
        return original(current, payload, config, seconds)

    session.method._request = watched
    return seen


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A finished run of three rounds, and what it asked."""
    ready = session(tmp_path_factory.mktemp("three") / "run", *POOL)
    requests = widths_of(ready)
    ready.execute()
    return ready, requests


@pytest.mark.slow
def test_every_slot_goes_to_a_device_that_can_hold_it(three):
    ready, requests = three
    budgets = ready.method.budgets
    assert sorted(budgets.values()) == [0.4, 0.4, 0.66, 0.66, 1.0, 1.0]
    assert len(requests) == 9
    assert {slot: size.width for _, slot, _, size in requests} == {0: 1.0, 1: 0.66, 2: 0.4}
    assert all(size.width <= budgets[client] for _, _, client, size in requests)
    assert len({client for _, _, client, _ in requests}) > 3


def test_bytes_are_those_of_the_slices(three):
    ready, _ = three
    method = ready.method
    each = [
        sum(int(np.prod(shape)) * np.dtype(kind).itemsize for shape, kind in method.spec_at(Size(w)).values())
        for w in (1.0, 0.66, 0.4)
    ]
    assert each[0] > each[1] > each[2]
    assert all(entry["bytes_down"] == entry["bytes_up"] == sum(each) for entry in metrics(ready))


def test_every_width_is_evaluated_with_its_own_statistics(three):
    ready, _ = three
    last = metrics(ready)[-1]
    assert list(last["width_accuracy"]) == ["1", "0.66", "0.4"]
    assert last["width_accuracy"]["1"] == last["test_accuracy"]
    result = json.loads((ready.folder / "result.json").read_text())
    assert result["width_accuracy"] == last["width_accuracy"]
    narrow = ready.method.slice_models()[Size(0.4)]
    wide = ready.method.slice_models()[FULL]
    assert narrow["norm.running_mean"].shape == (3,)
    assert (narrow["norm.running_mean"] != wide["norm.running_mean"][:3]).all()
    assert (narrow["last.bias"] == wide["last.bias"]).all()  # all slots have it


@pytest.mark.slow
def test_a_width_is_exported_and_loaded(three, tmp_path):
    ready, _ = three
    folder = launch([*SMALL, *POOL, "engine.workers=1"], tmp_path / "run")
    assert export_command([str(folder), "--width", "0.4"]) == 0
    file = load_file(folder / "model-round-000003-width-0.4.safetensors")
    expected = ready.method.slice_models()[Size(0.4)]
    assert same({name: file[name] for name in expected}, expected)
    model, task = network(folder, width=0.4), ready.config.load_data().task
    assert {name: t.numel() for name, t in model.state_dict().items()} == {n: a.size for n, a in file.items()}
    hits = model(task.prepare(task.test.x)).argmax(1).numpy() == task.test.y
    assert metrics(ready)[-1]["width_accuracy"]["0.4"] == hits.mean()
    assert export(folder, width=0.66, kind="torchscript").name == "model-round-000003-width-0.66.pt"
    assert load_file(export(folder, model=2))["first.weight"].shape == (3, 1, 3, 3)
    with pytest.raises(StorageError, match=r"has the widths 1, 0\.66, 0\.4"):
        export(folder, width=0.5)
    with pytest.raises(StorageError, match="Give one of them"):
        export(folder, width=0.4, model=1)


@pytest.mark.slow
def test_width_1_everywhere_is_fedcross_to_the_bit(tmp_path):
    plain = run(tmp_path / "plain", *FULL_POOL)
    sliced = run(tmp_path / "sliced", *FULL_POOL, "method.widths=[1.0]")
    assert same(plain.method.global_model(), sliced.method.global_model())
    assert (plain.method.pool.rows == sliced.method.pool.rows).all()
    keys = ("test_accuracy", "train_loss", "pool_similarity_mean", "pool_spread", "bytes_up", "chosen_0")
    assert [[e[k] for k in keys] for e in metrics(plain)] == [[e[k] for k in keys] for e in metrics(sliced)]


def test_resume_gives_the_same_model_to_the_bit(three, tmp_path):
    whole, _ = three
    run(tmp_path / "run", *POOL, "stop_at=2")
    resumed = run(tmp_path / "run", *POOL, f"resume={tmp_path / 'run'}")
    assert (resumed.method.pool.rows == whole.method.pool.rows).all()
    assert resumed.method.queue == whole.method.queue
    with pytest.raises(ConfigError, match="method"):
        run(tmp_path / "run", *POOL[:-2], "method.widths=[1.0,0.5,0.4]", POOL[-1], f"resume={tmp_path / 'run'}")


@pytest.mark.parametrize("kind", ["int8", "float16"])
def test_compressed_slices_arrive(three, tmp_path, kind):
    whole, _ = three
    small = run(tmp_path, *POOL, f"compression.up={kind}", f"compression.down={kind}")
    exact, coded = metrics(whole)[-1], metrics(small)[-1]
    assert coded["dropped"] == 0
    assert coded["bytes_up"] < 0.6 * exact["bytes_up"]
    np.testing.assert_allclose(small.method.pool.rows, whole.method.pool.rows, rtol=0, atol=0.25)


class Replaced:
    """A ClientApp that changes some replies."""

    def __init__(self, change):
        self.change = change

    def __call__(self, message, context):
        return self.change(message, client_app(message, context))


def test_a_reply_with_another_size_is_rejected(tmp_path):
    def full_instead(message, answer):
        asked_for = message.content.config_records["config"]
        if asked_for.get("width") == 0.4:
            content = RecordDict(dict(answer.content.items()))
            content["arrays"] = kept["arrays"]
            return Message(content, reply_to=message)
        if "width" not in asked_for:
            kept["arrays"] = answer.content["arrays"]
        return answer

    kept = {}
    ready = session(tmp_path, *POOL, "rounds=1", app=Replaced(full_instead))
    before = ready.method.pool.model(2)
    ready.execute()
    entry = metrics(ready)[0]
    assert entry["rejected"] == {"wrong_shape": 1}
    assert same(ready.method.pool.model(2), before)
    assert not same(ready.method.pool.model(1), ready.method.pool.model(1) | {"last.bias": before["last.bias"]})


def test_a_lost_slot_keeps_its_model_and_goes_first_in_the_next_round(tmp_path):
    def lose_the_middle(message, answer):
        asked_for = message.content.config_records["config"]
        if asked_for.get("width") == 0.66 and asked_for["round"] == 1:
            raise RuntimeError("lost")
        return answer

    ready = session(tmp_path, *POOL, "rounds=1", app=Replaced(lose_the_middle))
    before = ready.method.pool.model(1)
    ready.execute()
    assert same(ready.method.pool.model(1), before)
    assert ready.method.queue[0] == 1
    assert metrics(ready)[0]["dropped"] == 1


def test_a_spare_client_takes_a_slot_only_if_it_can_hold_it(tmp_path):
    def lose_the_first(message, answer):
        if len(first) < 3:
            first.append(message.content.config_records["config"]["client"])
            raise RuntimeError("lost")
        return answer

    first = []
    ready = session(tmp_path, *POOL, "rounds=1", "federation.reassign=5", app=Replaced(lose_the_first))
    requests = widths_of(ready)
    ready.execute()
    assert metrics(ready)[0]["spares"] == 3
    assert metrics(ready)[0]["dropped"] == 0
    assert all(size.width <= ready.method.budgets[client] for _, _, client, size in requests)


def test_a_slot_that_no_device_can_hold_waits_and_then_comes_first(tmp_path, caplog):
    ready = session(tmp_path, *POOL)
    method = ready.method
    method.budgets = {client: 0.66 if client < 3 else 0.4 for client in range(6)}
    clients = method.sample(1, range(6))
    payloads = method.dispatch(Round(1, 0, clients, 1))
    assert [payload.slot for payload in payloads] == [1, 2]
    assert method.report.metrics["waiting_slots"] == 1
    assert "slots that wait, since no device that is free can hold them: 1" in caplog.text
    node = method.nodes.online.setdefault(5, 55)
    method.nodes._note_width(node, 1.0)  # it says that it can
    clients = method.sample(2, range(6))
    assert 5 in clients
    assert {p.slot: p.client for p in method.dispatch(Round(2, 0, clients, 1))}[0] == 5


def test_different_random_starts_are_cut_to_the_slots():
    ready = FedCross(clients_per_round=3, widths=[1.0, 0.66, 0.3], independent_start=True)
    ready.plan = PLAN
    ready.begin(full(), {"in", "out", "bias"})
    ready.start_from(full(10.0 * slot) for slot in range(3))
    assert ready.pool.model(2)["in"].tolist() == [[20, 21]]


def test_clients_score_the_model_that_their_device_can_hold(tmp_path):
    ready = run(tmp_path, *POOL, "rounds=1", "evaluate_clients=true")
    assert sorted(metrics(ready)[0]["client_accuracy"]) == [str(client) for client in range(6)]


def test_widths_of_devices_are_checked_before_the_run():
    ready = load([*SMALL, *POOL, "devices.widths=[0.66,0.66,0.4]"])
    network_of_run, _ = ready.network(ready.load_data().task)
    with pytest.raises(ConfigError, match=r"method.widths=1: no device can hold it, the widest is 0.66"):
        check_run(ready, network_of_run, ready.load_data().task, 6)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["method.widths=[1.0,0.5]", "method.similarity=manhattan"], "wrong: similarity"),
        (["method.widths=[1.0,0.5]", "method.part=state", "method.global_model=uploads"], "wrong: part, global_model"),
        (
            ["method.widths=[1.0,0.8,0.6,0.4]"],
            "3 models; each width needs one. Raise clients_per_round or",
        ),
        (
            ["method.widths=[1.0,0.8,0.6,0.4]", "method.k=3"],
            "3 models; each width needs one. Raise method.k or give fewer",
        ),
        (["method.widths=[1.0,0.5]", "method.shares=[0.5]"], "shares [0.5] are 1, widths [1.0, 0.5] are 2"),
        (["devices.widths=[0.0]", "devices=equal"], "above 0, and 1 at most"),
        (["devices.widths=[0.4,1.0]", "devices=equal"], "devices.widths has 2 entries for 1 shares"),
    ],
)
def test_wrong_settings_are_refused(wrong, said):
    with pytest.raises(ConfigError) as caught:
        load([*SMALL, "method=fedcross", *wrong])
    assert said in str(caught.value)


@pytest.mark.parametrize("changed", ["clients_per_round=2", "method.k=4"])
def test_a_resumed_run_has_as_many_models(tmp_path, changed):
    run(tmp_path / "run", *POOL, "rounds=1", "method.widths=[1.0,0.4]")
    again = [*SMALL, *POOL, "rounds=2", "method.widths=[1.0,0.4]", changed, f"resume={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=r"has a pool of 3 models of several widths, now it would have [24]"):
        session(tmp_path / "run", *again).execute()


def test_a_pool_of_several_widths_has_the_same_number_of_models_in_all_rounds():
    assert FedCrossParams(widths=[1.0, 0.5], k=3).k.values() == [3]
    with pytest.raises(ValueError, match="a constant k; wrong: k"):
        FedCrossParams(widths=[1.0, 0.5], k={"schedule": "linear", "start": 3, "end": 4, "rounds": 5})


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (["method=heterofl"], "every simulated device can train the full model"),
        (["method=fedavg", "devices=three_sizes"], "method=fedavg sends full models to every device"),
        (["method=fedcross", "method.widths=[1.0]"], None),
        (["method=adaptivefl", "devices=three_sizes"], None),
    ],
)
def test_a_run_says_so_if_widths_have_no_effect(own, said):
    found = remarks(load([*SMALL, *own]))
    assert (said in found[0]) if said else found == []


def test_an_app_of_ones_own_needs_a_plan():
    with pytest.raises(ConfigError, match="needs the network"):
        FedCross(clients_per_round=2, widths=[1.0, 0.5]).begin({"w": np.zeros(2, np.float32)})


@pytest.mark.parametrize("width", [0, -0.5, 1.01, True, "0.4"])
def test_a_node_with_a_wrong_width_says_so(width):
    with pytest.raises(ConfigError, match="in the node's configuration"):
        device_width(width)
