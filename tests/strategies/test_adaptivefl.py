"""AdaptiveFL: models of several widths and starts, and clients drawn by what they could train."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError
from fedcross.strategies.adaptivefl import AdaptiveFL
from fedcross.strategies.method import Round, Upload
from fedcross.tasks.models.width import FULL, Corners, Width, kept
from tests.support.federation import SMALL, run, same
from tests.support.game import Game
from tests.support.slices import THREE


def shapes(width):
    """Four hidden layers of four units; the weights of layer i are (4, 4), the first has one input."""
    units = [4 if i < width.whole else kept(4, width.ratio) for i in range(4)]
    return {"w0": (units[0], 1), **{f"w{i}": (units[i], units[i - 1]) for i in range(1, 4)}}


PLAN = Corners(shapes, (4,) * 4)
MEDIUM, SMALLEST = Width(0.66, 0), Width(0.4, 0)
#: From the smallest to the full one.
ORDER = [Width(0.4, 0), Width(0.4, 1), Width(0.4, 2), Width(0.66, 0), Width(0.66, 1), Width(0.66, 2), FULL]


def full(value):
    return {name: np.full(shape, value, np.float32) for name, shape in shapes(FULL).items()}


def begun(clients=3, available=10, budgets=None, **values):
    method = Game(AdaptiveFL, full(0.0), clients_per_round=clients, corners=PLAN, **values)
    method.__dict__["budgets"] = budgets or dict.fromkeys(range(available), 1.0)
    return method


def learn(method, client, sent, returned):
    method.method.learn(method.state, client, sent, returned)


def reward(method, client, width):
    return method.method.reward(method.state, client, width)


def send(method, number, clients):
    return method.dispatch(method.round(number, clients, budgets=method.budgets))


def drawing(method, *widths):
    """Let the slots draw these models."""
    method.method._draw = lambda state, current, count: list(widths)


def test_seven_models_the_full_one_and_three_of_each_width():
    method = begun()
    assert list(reversed(method.method.widths(PLAN))) == ORDER
    assert [PLAN.shape("w1", size) for size in ORDER[:3]] == [(2, 2), (2, 4), (4, 4)]
    assert AdaptiveFL(starts=[0, 9]).widths(PLAN) == [FULL, Width(0.66, 0), Width(0.4, 0)]


def test_the_tables_by_hand():
    """The authors' rules: success adds 1 from the model on, the full one 3 more; failure 3 at what was returned."""
    method = begun()
    learn(method, 4, MEDIUM, MEDIUM)
    assert method.resources[4].tolist() == [1, 1, 1, 2, 2, 2, 2]
    assert method.counts[4].tolist() == [1, 3, 1]
    learn(method, 5, FULL, FULL)
    assert method.resources[5].tolist() == [1, 1, 1, 1, 1, 1, 5]
    learn(method, 6, FULL, ORDER[2])
    assert method.resources[6].tolist() == [1, 1, 4, 0, 0, 0, 0]  # 1 - 1, 1 - 2, 1 - 3, 1 - 4, never below 0
    assert method.counts[6].tolist() == [2, 1, 2]


def test_the_reward_by_hand():
    """A new client: small (7 + 6 + 5)/21 above .5; medium (4 + 3 + 2)/21; large 1/7. Then curiosity: 1/sqrt(count)."""
    method = begun()
    assert [reward(method, 0, width) for width in (0.4, 0.66, 1.0)] == pytest.approx([0.5, 9 / 21, 1 / 7])
    learn(method, 0, FULL, SMALLEST)
    # resources 4, 0, 0, 0, 0, 0, 0; counts 2, 1, 2
    assert reward(method, 0, 0.4) == pytest.approx(4 / (3 * 4) / np.sqrt(2))
    assert reward(method, 0, 0.66) == reward(method, 0, 1.0) == 0


def test_clients_that_failed_with_large_models_get_fewer_of_them():
    method = begun(clients=1, available=2)
    for _ in range(3):
        learn(method, 0, FULL, SMALLEST)
        learn(method, 1, FULL, FULL)
    drawn = Counter()
    for number in range(1, 200):
        size = method.method._draw(method.state, method.round(number), 1)[0]
        drawn[size.ratio, method.sample(number, [0, 1])[0]] += 1
    assert drawn[1.0, 0] == 0
    assert drawn[1.0, 1] > 10
    assert drawn[0.4, 0] > 10
    assert {width for width, _ in drawn} == {0.4, 0.66, 1.0}


def test_nobody_is_drawn_twice_and_without_a_reward_all_are_equal():
    method = begun(clients=5, available=5)
    for client in range(5):
        learn(method, client, FULL, SMALLEST)
    assert sorted(method.sample(1, range(5))) == [0, 1, 2, 3, 4]


def test_a_device_returns_the_largest_smaller_model_that_it_can_hold_and_weights_are_examples():
    method = begun(clients=2, budgets={0: 0.4, 1: 1.0})
    drawing(method, FULL, Width(0.66, 1))
    first, second = send(method, 1, (0, 1))
    assert first.width == Width(0.4, 2)
    assert second.width == Width(0.66, 1)
    ups = [
        Upload(0, 0, PLAN.corner(full(4.0), Width(0.4, 2)), {}, 1, {}),
        Upload(1, 1, PLAN.corner(full(8.0), Width(0.66, 1)), {}, 3, {}),
    ]
    method.aggregate(Round(1, 0, (0, 1), 0), ups)
    # w1: the first has all 4x4, the second the first 3 outputs of 4 inputs: (4 + 3 * 8)/4 = 7, elsewhere 4
    assert method.global_model()["w1"].tolist() == [[7] * 4] * 3 + [[4] * 4]
    # w2: 2 outputs of 4 inputs and 3 of 3
    assert method.global_model()["w2"].tolist() == [[7, 7, 7, 4]] * 2 + [[8, 8, 8, 0]] + [[0] * 4]
    assert method.resources[0].tolist() == [1, 1, 4, 0, 0, 0, 0]
    assert method.resources[1].tolist() == [1, 1, 1, 1, 2, 2, 2]


def test_a_request_in_vain_counts_in_curiosity_and_not_in_the_table_of_resources():
    """Client 1 returns nothing, client 2 neither, but a spare answers in its place."""
    method = begun(clients=3, budgets={0: 1.0, 1: 0.4, 2: 1.0, 3: 1.0})
    drawing(method, FULL, FULL, FULL)
    send(method, 1, (0, 1, 2))
    method.aggregate(
        Round(1, 0, (0, 1, 2), 0), [Upload(0, 0, full(1.0), {}, 1, {}), Upload(3, 2, full(1.0), {}, 1, {})]
    )
    counts = {client: row.tolist() for client, row in method.counts.items()}
    assert counts == {0: [1, 1, 3], 1: [2, 1, 2], 2: [1, 1, 3], 3: [1, 1, 3]}
    assert [bool((method.resources[client] == 1).all()) for client in range(4)] == [False, True, True, False]
    other = begun(clients=3, budgets=method.budgets)
    saved = method.checkpoint()
    saved.values = json.loads(json.dumps(saved.values))
    other.resume(saved)
    assert other.checkpoint().values == method.checkpoint().values


@pytest.mark.slow
def test_clients_that_never_answer_are_not_asked_more_and_more():
    """5 of 20: equal shares are .25. Without the count they get more than half of the last requests."""
    method = begun(clients=5, available=20)
    asked = []
    for number in range(1, 121):
        current = Round(number, 0, method.sample(number, range(20)), 0)
        sent = {payload.slot: payload for payload in send(method, number, current.clients)}
        ups = [Upload(c, s, sent[s].arrays, {}, 1, {}) for s, c in enumerate(current.clients) if c >= 5]
        method.aggregate(current, ups)
        asked += [client < 5 for client in current.clients]
    assert np.mean(asked[-200:]) < 0.35


def test_it_goes_on_from_a_checkpoint_with_its_tables():
    one, other = begun(), begun()
    learn(one, 3, FULL, SMALLEST)
    saved = one.checkpoint()
    saved.values = json.loads(json.dumps(saved.values))
    other.resume(saved)
    assert other.resources[3].tolist() == one.resources[3].tolist()
    assert [other.sample(n, range(10)) for n in range(1, 9)] == [one.sample(n, range(10)) for n in range(1, 9)]


@pytest.mark.slow
def test_a_run_with_batch_normalisation_resumes_to_the_bit(tmp_path):
    own = (*THREE, "method=adaptivefl", "evaluate_every=3")
    whole = run(tmp_path / "whole", *own)
    run(tmp_path / "part", *own, "stop_at=2")
    resumed = run(tmp_path / "part", *own, f"resume={tmp_path / 'part'}")
    assert all(
        same(a, b)
        for a, b in zip(whole.driver.evaluation().widths.values(), resumed.driver.evaluation().widths.values())
    )
    last = json.loads((whole.folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert list(last["width_accuracy"]) == ["1", "0.66@1", "0.66", "0.4@1", "0.4"]  # the network has two groups


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (["method.widths=[0.66,0.4]"], "give 1.0, the full model"),
        (["method.widths=[1.0]"], "at least 2"),
        (["method.starts=[1,1]"], "there twice"),
        (["method.starts=[-1]"], "0"),
    ],
)
def test_wrong_settings_are_refused(own, said):
    with pytest.raises(ConfigError) as caught:
        load([*SMALL, "method=adaptivefl", *own])
    assert said in str(caught.value)
