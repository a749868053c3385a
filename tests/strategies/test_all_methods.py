"""What holds for every method: its state is packed exactly, lost slots do no harm, batch counters stay integers."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import numpy as np
import pytest

import fedcross
from fedcross.core.errors import ConfigError
from fedcross.strategies.method import Round, Start, Upload
from fedcross.strategies.parts.pooled import Pooled, PooledParams, PoolState
from fedcross.strategies.registry import method_class
from fedcross.strategies.round.driver import uniform
from fedcross.strategies.round.packing import pack, unpack
from fedcross.tasks.models.width import FULL, Corners

METHODS = sorted(set(fedcross._methods().values()))
K, CLIENTS, ROUNDS = 4, 7, 5
SHAPES = {
    "features.w": (6, 3),
    "features.mean": (6,),
    "features.count": (),
    "classifier.weight": (5, 6),
    "classifier.bias": (5,),
}
TRAINED = ("features.w", "classifier.weight", "classifier.bias")


def shapes(width):
    hidden = 6 if width.ratio >= 1 or width.whole else max(1, int(np.ceil(width.ratio * 6)))
    return {n: tuple(hidden if size == 6 else size for size in shape) for n, shape in SHAPES.items()}


def initial():
    draw = np.random.default_rng(0)
    arrays = {n: draw.normal(size=shape).astype(np.float32) for n, shape in SHAPES.items()}
    return arrays | {"features.count": np.array(3, np.int64)}


def start():
    return Start(initial(), TRAINED, K, ROUNDS, 1, Corners(shapes, (6,)))


def answer(task, number, fill):
    """Return a client's upload: every float entry moves by a draw keyed by round and client."""
    draw = np.random.default_rng([number, task.client, task.slot])
    moved = {
        n: a + draw.normal(size=a.shape).astype(a.dtype) if a.dtype.kind == "f" else a + 2
        for n, a in task.arrays.items()
    }
    groups = {g: {n: np.full(s, fill(d), d) for n, (s, d) in spec.items()} for g, spec in task.returns.items()}
    return Upload(task.client, task.slot, {n: np.asarray(a) for n, a in moved.items()}, groups, 5, {}, task, 1.0)


def play(method, state, number, lost=()):
    """Play a round in which the clients `lost` do not answer; return the metrics."""
    s, metrics = start(), {}
    for exchange in range(1 if method.asynchronous else method.exchanges(K)):
        available = list(range(CLIENTS))
        slots = tuple(range(K)) if method.asynchronous else ()
        current = Round(number, exchange, (), s.seed, ROUNDS, K, K, slots, budgets=dict.fromkeys(available, 1.0))
        if exchange == 0:
            clients = method.sample(state, replace(current, clients=uniform(current, available)), available)
        current = Round(
            number, exchange, clients, s.seed, ROUNDS, K, len(clients), slots, budgets=dict.fromkeys(available, 1.0)
        )
        tasks = method.dispatch(state, current)
        assert len({task.slot for task in tasks}) == len(tasks)
        assert {task.client for task in tasks} <= set(clients)
        uploads = [answer(task, number, lambda dtype: 1) for task in sorted(tasks, key=lambda task: task.slot)]
        metrics |= method.aggregate(state, current, [u for u in uploads if u.client not in lost])
    return metrics


def equal(a, b):
    return list(a) == list(b) and all(
        a[n].dtype == b[n].dtype and np.array_equal(a[n], b[n], equal_nan=True) for n in a
    )


#: Methods, and settings of theirs that change what the state holds.
VARIANTS = [
    *(
        (name, {"heterofl": {"widths": (1.0, 0.5)}, "fedgen": {"generator_steps": 2}}.get(name, {}))
        for name in METHODS
        if name not in ("flwr", "fedfusion")
    ),
    *(("fedsam", {"swa": {"start": 0.25, "cycle": 1}}), ("fedasam", {"swa": {"start": 0.25, "cycle": 1}})),
    *(
        ("feddyn", {"global_model": "server"}),
        ("ima", {"start": 0.0, "window": 2}),
        ("ima", {"start": 0.5, "window": 3}),
    ),
    *(("fedmr", {"first_stage": 2}), ("daisychain", {"average": 3})),
    ("fedfan", {"push": 0.0, "correct": False}),
]


@pytest.mark.parametrize(("name", "values"), VARIANTS)
def test_every_method(name, values):
    method = method_class(name)(**values)
    state = method.init(start())
    everybody = set(range(CLIENTS))
    play(method, state, 1)
    before = copy.deepcopy(method.global_model(state))
    assert {n: (a.shape, a.dtype) for n, a in before.items()} == {n: (a.shape, a.dtype) for n, a in initial().items()}
    play(method, state, 2, lost=everybody)
    after = method.global_model(state)
    assert all(np.isfinite(array).all() for array in after.values() if array.dtype.kind == "f")
    if name not in ("ima", "feddyn"):
        assert all(np.allclose(before[n], after[n], atol=1e-5) for n in before), "a round without uploads"
    play(method, state, 3)
    after = copy.deepcopy(method.global_model(state))
    packed = copy.deepcopy(pack(state))
    other = unpack(packed, method.init(start()))
    assert equal(method.global_model(other), after)
    for number in (4, 5):
        first, second = play(method, state, number, lost={1, 2}), play(method, other, number, lost={1, 2})
        assert first == pytest.approx(second, nan_ok=True)
    assert equal(method.global_model(state), method.global_model(other))
    assert pack(state).values == pack(other).values


def test_a_state_that_cannot_be_packed_is_named():
    from dataclasses import dataclass

    @dataclass
    class State:
        model: object

    with pytest.raises(ConfigError, match=r"State\.model"):
        pack(State({"w": object()}))


def test_a_wrong_method_name_is_one_line():
    with pytest.raises(ConfigError, match="nothere"):
        method_class("nothere")
    assert FULL.ratio == 1


@dataclass
class Counting(PoolState):
    """A state with a field of its own."""

    rounds: int = 0


class Counted(Pooled[PooledParams, Counting]):
    def recombine(self, state, round, members):
        state.rounds += 1


def test_a_pools_state_is_the_class_in_the_brackets():
    method, state = Counted(), Counted().init(start())
    play(method, state, 1)
    assert (type(state), state.rounds) == (Counting, 1)
