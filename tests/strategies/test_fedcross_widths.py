"""FedCross with models of several widths, through whole rounds: devices, guard, compression, resume, export."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flwr.app import Message, RecordDict

from fedcross.client.app import app as client_app
from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError
from fedcross.strategies.fedcross import FedCross
from fedcross.strategies.method import Start
from fedcross.strategies.round.clock import budgets_of
from fedcross.tasks.models.width import FULL, Width
from tests.strategies.pool.test_widths import PLAN, full
from tests.support.federation import SMALL, run, same, session
from tests.support.slices import POOL, THREE

FULL_POOL = (*THREE[:2], "train.lr=0.1", "method=fedcross", "method.alpha=0.9")


def metrics(ready):
    return [json.loads(line) for line in (ready.folder / "metrics.jsonl").read_text().splitlines()]


def widths_of(session):
    """Each task of the session: (round, slot, client, width)."""
    seen, method = [], session.driver.method
    original = method.dispatch

    def watched(state, current):
        tasks = original(state, current)
        seen.extend((current.number, task.slot, task.client, task.width) for task in tasks)
        return tasks

    method.dispatch = watched
    return seen


def budgets_of_run(session):
    """Return the width of each client's device, as the server knows it."""
    return budgets_of(session.config.devices, session.config.seed, 6)


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
    budgets = budgets_of_run(ready)
    assert sorted(budgets.values()) == [0.4, 0.4, 0.66, 0.66, 1.0, 1.0]
    assert len(requests) == 9
    assert {slot: size.ratio for _, slot, _, size in requests} == {0: 1.0, 1: 0.66, 2: 0.4}
    assert all(size.ratio <= budgets[client] for _, _, client, size in requests)
    assert len({client for _, _, client, _ in requests}) > 3


@pytest.mark.slow
def test_bytes_are_those_of_the_slices(three):
    ready, _ = three
    each = [sum(array.nbytes for array in model.values()) for model in ready.driver.evaluation().widths.values()]
    assert each[0] > each[1] > each[2]
    assert all(entry["bytes_down"] == entry["bytes_up"] == sum(each) for entry in metrics(ready))


def test_every_width_is_evaluated_with_its_own_statistics(three):
    ready, _ = three
    last = metrics(ready)[-1]
    assert list(last["width_accuracy"]) == ["1", "0.66", "0.4"]
    assert last["width_accuracy"]["1"] == last["test_accuracy"]
    result = json.loads((ready.folder / "result.json").read_text())
    assert result["width_accuracy"] == last["width_accuracy"]
    narrow = ready.driver.evaluation().widths[Width(0.4)]
    wide = ready.driver.evaluation().widths[FULL]
    assert narrow["norm.running_mean"].shape == (3,)
    assert (narrow["norm.running_mean"] != wide["norm.running_mean"][:3]).all()
    assert (narrow["last.bias"] == wide["last.bias"]).all()  # all slots have it


@pytest.mark.slow
def test_width_1_everywhere_is_fedcross_to_the_bit(tmp_path):
    plain = run(tmp_path / "plain", *FULL_POOL)
    sliced = run(tmp_path / "sliced", *FULL_POOL, "method.widths=[1.0]")
    assert same(plain.driver.global_model(), sliced.driver.global_model())
    assert (plain.driver.state.pool.rows == sliced.driver.state.pool.rows).all()
    keys = ("test_accuracy", "train_loss", "pool_similarity_mean", "pool_spread", "bytes_up", "chosen_0")
    assert [[e[k] for k in keys] for e in metrics(plain)] == [[e[k] for k in keys] for e in metrics(sliced)]


@pytest.mark.slow
def test_resume_gives_the_same_model_to_the_bit(three, tmp_path):
    whole, _ = three
    run(tmp_path / "run", *POOL, "stop_at=2")
    resumed = run(tmp_path / "run", *POOL, f"resume={tmp_path / 'run'}")
    assert (resumed.driver.state.pool.rows == whole.driver.state.pool.rows).all()
    assert resumed.driver.state.queue == whole.driver.state.queue
    with pytest.raises(ConfigError, match="method"):
        run(tmp_path / "run", *POOL[:-2], "method.widths=[1.0,0.5,0.4]", POOL[-1], f"resume={tmp_path / 'run'}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "float16"])
def test_compressed_slices_arrive(three, tmp_path, kind):
    whole, _ = three
    small = run(tmp_path, *POOL, f"compression.up={kind}", f"compression.down={kind}")
    exact, coded = metrics(whole)[-1], metrics(small)[-1]
    assert coded["dropped"] == 0
    assert coded["bytes_up"] < 0.6 * exact["bytes_up"]
    np.testing.assert_allclose(small.driver.state.pool.rows, whole.driver.state.pool.rows, rtol=0, atol=0.25)


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
    before = ready.driver.state.pool.model(2)
    ready.execute()
    entry = metrics(ready)[0]
    assert entry["rejected"] == {"wrong_shape": 1}
    assert same(ready.driver.state.pool.model(2), before)
    assert not same(
        ready.driver.state.pool.model(1), ready.driver.state.pool.model(1) | {"last.bias": before["last.bias"]}
    )


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
    assert all(size.ratio <= budgets_of_run(ready)[client] for _, _, client, size in requests)


def test_different_random_starts_are_cut_to_the_slots():
    start = Start(full(), ("in", "out", "bias"), 3, corners=PLAN, independent=lambda slot: full(10.0 * slot))
    state = FedCross(widths=[1.0, 0.66, 0.3], independent_start=True).init(start)
    assert state.pool.model(2)["in"].tolist() == [[20, 21]]


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (["method.widths=[1.0,0.5]", "method.similarity=manhattan"], "similarity"),
        (["method.widths=[1.0,0.5]", "method.part=state", "method.global_model=uploads"], "global_model"),
        (["method.widths=[1.0,0.8,0.6,0.4]"], "clients_per_round"),
        (["method.widths=[1.0,0.8,0.6,0.4]", "method.k=3"], "method.k"),
        (["method.widths=[1.0,0.5]", "method.shares=[0.5]"], "shares"),
    ],
)
def test_wrong_settings_are_refused(wrong, word):
    with pytest.raises(ConfigError) as caught:
        load([*SMALL, "method=fedcross", *wrong])
    assert word in str(caught.value)
