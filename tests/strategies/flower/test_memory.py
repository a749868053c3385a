"""What a strategy keeps between rounds goes through a checkpoint with its kind; what cannot is named."""

from __future__ import annotations

import collections
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.serverapp.strategy import FedAvg

from fedcross.client.app import app as client_app
from fedcross.engines.grid import LocalGrid
from fedcross.server.checkpoint import Checkpoints
from fedcross.strategies.flower.memory import recall, remember, snapshot
from fedcross.strategies.flwr import Flwr


def brought_back(tmp_path: Path, value: Any, start: Any = None) -> tuple[Any, dict[str, str]]:
    """Return what a resumed strategy finds where another one had `value`, and what was said to be lost."""
    first, second = FedAvg(), FedAvg()
    first.kept = second.kept = start
    fresh = snapshot(first)
    first.kept = value
    state, lost = remember(first, fresh, [])
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {"run": "r"})
    recall(second, checkpoints.load(1)[0], [])
    return second.kept, lost


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1.5), np.float64(0.1), np.float16(2), np.int64(2**62), np.uint8(3), np.bool_(True), np.str_("a"),
        (1, (2.5, "b")), {7: 1.5, -1: None}, {np.int64(3): np.float32(2)}, {(1, "a"): [(), {}]}, {3, 4},
        frozenset({"a"}), {True: 1}, {"$kind": "set", "of": [1]}, float("inf"), [np.float32("inf")], {"a": {2: (1,)}},
    ],
    ids=repr,
)  # fmt: skip
def test_values_keep_their_kind(tmp_path: Path, value: Any) -> None:
    found, lost = brought_back(tmp_path, value)
    assert (found, lost) == (value, {})
    assert repr(found) == repr(value)


def test_what_is_no_number_comes_back_too(tmp_path: Path) -> None:
    assert np.isnan(brought_back(tmp_path, float("nan"))[0])


def test_arrays_between_other_values_come_back_in_their_dtypes(tmp_path: Path) -> None:
    value = {4: {"mean": np.float64([1, 2]), "steps": 3}, 5: (np.int8([[1]]), [np.bool_([True])])}
    found, lost = brought_back(tmp_path, value)
    assert not lost
    assert found[4]["steps"] == 3
    assert found[4]["mean"].tolist() == [1, 2]
    assert (found[5][0].dtype, found[5][0].shape, found[5][1][0].dtype) == (np.int8, (1, 1), bool)


def test_an_attribute_that_is_as_at_the_start_is_not_stored() -> None:
    strategy = FedAvg()
    strategy.kept, strategy.lock, strategy.names = {1: np.float32(2)}, threading.Lock(), collections.deque([1])
    state, lost = remember(strategy, snapshot(strategy), [])
    assert (state.arrays, state.values, lost) == ({}, {}, {})


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (collections.deque([1]), "deque"),
        ({"a": [collections.Counter("a")]}, "Counter"),
        (threading.Lock(), "lock"),
        (np.array([None]), "ndarray"),
        (np.longdouble(1), "longdouble"),
    ],
)
def test_what_cannot_be_kept_is_named(tmp_path: Path, value: Any, named: str) -> None:
    found, lost = brought_back(tmp_path, value, start=5)
    assert found == 5
    assert lost == {"kept": named}


def test_a_strategy_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    LocalGrid(client_app, 1, {})
    method = Flwr(name="FedAvg", clients_per_round=2)
    method.begin({"w": np.zeros(1, np.float32)}, {"w"})
    method.strategy.last = collections.deque([1])
    with caplog.at_level(logging.WARNING):
        method.checkpoint()
        method.checkpoint()
    assert caplog.text.count("no checkpoint holds its attribute last (a deque is in it)") == 1
