"""What a strategy keeps between rounds goes through a checkpoint with its kind; what cannot is named."""

from __future__ import annotations

import collections
import enum
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import FedAdam, FedAvg

from fedcross.client.app import app as client_app
from fedcross.core.errors import StorageError
from fedcross.engines.grid import LocalGrid
from fedcross.server.checkpoint import Checkpoints
from fedcross.strategies.flower.memory import recall, remember, snapshot
from fedcross.strategies.flwr import Flwr
from fedcross.strategies.round.federation import State
from fedcross.strategies.wire.protocol import Round, Upload


def brought_back(tmp_path: Path, value: Any, start: Any = None) -> tuple[Any, dict[str, str]]:
    """Return what a resumed strategy finds where another one had `value`, and what was said to be lost."""

    def change(strategy: Any) -> None:
        strategy.kept = value

    found, lost = resumed(tmp_path, lambda: having(kept=start), change)
    return found.kept, lost


def having(**attributes: Any) -> Any:
    """Return a strategy with these attributes."""
    strategy = FedAvg()
    vars(strategy).update(attributes)
    return strategy


def resumed(tmp_path: Path, build: Callable[[], Any], change: Callable[[Any], None]) -> tuple[Any, dict[str, str]]:
    """Return a new strategy that continues from a changed one's checkpoint, and what was said to be lost."""
    first, second = build(), build()
    fresh = snapshot(first)
    change(first)
    state, lost = remember(first, fresh, {"b": np.zeros(1), "a": np.zeros(1)})
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state, {"run": "r"})
    recall(second, checkpoints.load(1)[0], ["b", "a"])
    return second, lost


@pytest.mark.parametrize(
    "value",
    [
        np.float32(1.5), np.float64(0.1), np.float16(2), np.int64(2**62), np.uint8(3), np.bool_(True), np.str_("a"),
        (1, (2.5, "b")), {7: 1.5, -1: None}, {np.int64(3): np.float32(2)}, {(1, "a"): [(), {}]}, {3, 4},
        frozenset({"a"}), {True: 1}, {"$float": "x"}, collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, {"a": [1]}), {np.str_("k"): 1}, {"a": {2: (1,)}},
        {"$kind": "set", "of": [1]}, float("inf"), [np.float32("inf")],
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
    state, lost = remember(strategy, snapshot(strategy), {})
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


@pytest.mark.parametrize("start", [0, 1, -0.0], ids=repr)
@pytest.mark.parametrize("value", [0.0, True, 0], ids=repr)
def test_a_value_of_another_kind_is_another_value(tmp_path: Path, start: Any, value: Any) -> None:
    assert repr(brought_back(tmp_path, value, start)[0]) == repr(value)


@pytest.mark.parametrize(
    "keys", [(12, 3, 100), ("z", "a"), ("a", "b"), ("b", "a"), ("10", "9"), (True, False), (1, "1")], ids=str
)
def test_a_dict_of_arrays_keeps_the_order_of_its_keys(tmp_path: Path, keys: tuple[Any, ...]) -> None:
    """A mean over its values adds in this order, and who throws out the oldest entry goes by it."""
    found, lost = brought_back(tmp_path, {key: np.float32([i]) for i, key in enumerate(keys)})
    assert not lost
    assert [(repr(key), float(array[0])) for key, array in found.items()] == [
        (repr(key), i) for i, key in enumerate(keys)
    ]


def test_checkpoints_without_an_order_are_read() -> None:
    """Those of older versions have arrays alone: moments under the model's names, others by number or name."""
    strategy: Any = FedAdam()
    names = [f"{name}.{entry}" for name in ("m_t", "v_t") for entry in "ab"]
    names += [f"strategy.by_node.{i}" for i in (10, 9)] + [f"strategy.step.{i}" for i in (10, 9)]
    state = State({name: np.float32([i]) for i, name in enumerate(names)})
    state.values["kinds"] = {"m_t": "dict", "v_t": "dict", "by_node": "numbered", "step": "list"}
    recall(strategy, state, ["b", "a"])
    assert list(strategy.m_t) == list(strategy.v_t) == ["b", "a"]
    assert {node: float(one[0]) for node, one in strategy.by_node.items()} == {9: 5, 10: 4}
    assert [float(one[0]) for one in strategy.step] == [7, 6]


class Phase(enum.StrEnum):
    A = "a"


class Table(np.ndarray):
    """An array with more than numbers, as numpy's matrix."""


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (collections.defaultdict(lambda: np.zeros(1), a=np.zeros(1)), "defaultdict"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "MaskedArray"),
        (np.zeros(1).view(Table), "Table"),
        ({Phase.A: np.zeros(1)}, "Phase"),
    ],
    ids=["defaultdict", "masked", "table", "enum"],
)
def test_a_kind_that_would_be_lost_is_told(tmp_path: Path, value: Any, named: str) -> None:
    assert brought_back(tmp_path, value, start=5) == (5, {"kept": named})


def test_an_ordered_dict_of_arrays_stays_one(tmp_path: Path) -> None:
    found, lost = brought_back(tmp_path, collections.OrderedDict(z=np.ones(1), a=np.zeros(1)))
    assert (type(found), list(found), lost) == (collections.OrderedDict, ["z", "a"], {})


@pytest.mark.parametrize("wrapped", [lambda a: a, lambda a: {"a": a}, lambda a: (a, 1)], ids=["array", "dict", "tuple"])
def test_arrays_in_the_byte_order_of_another_machine_come_back(tmp_path: Path, wrapped: Callable[[Any], Any]) -> None:
    found, lost = brought_back(tmp_path, wrapped(np.array([1, 2], ">f4")))
    one = found if isinstance(found, np.ndarray) else next(iter(found.values() if isinstance(found, dict) else found))
    assert (one.tolist(), one.dtype, lost) == ([1, 2], np.float32, {})


def test_an_attribute_that_was_deleted_stays_away(tmp_path: Path) -> None:
    found, lost = resumed(tmp_path, lambda: having(kept=1.0, inner=having(kept=2.0)), lambda s: delattr(s, "kept"))
    assert not hasattr(found, "kept")
    assert (found.inner.kept, lost) == (2.0, {})
    found, _ = resumed(tmp_path, lambda: having(inner=having(kept=2.0)), lambda s: delattr(s.inner, "kept"))
    assert not hasattr(found.inner, "kept")


def test_attributes_that_are_one_array_or_list_stay_one(tmp_path: Path) -> None:
    def change(strategy: Any) -> None:
        strategy.best = strategy.now = np.zeros(2)
        strategy.pair = {"a": strategy.now, "b": np.ones(1)}
        strategy.inner.seen = strategy.seen = [3]
        strategy.within = (7, strategy.pair["b"])

    build = lambda: having(best=None, now=None, pair=None, seen=[], within=None, inner=having(seen=None))  # noqa: E731
    found, lost = resumed(tmp_path, build, change)
    assert not lost
    found.now += 1
    assert found.best.tolist() == found.pair["a"].tolist() == [1, 1]
    assert found.within[1] is found.pair["b"]
    assert found.within[1].tolist() == [1]
    found.seen.append(4)
    assert found.inner.seen == [3, 4]


class Store:
    """What pickle refuses, with something in it."""

    def __init__(self) -> None:
        self.count, self.inner, self.make = [0], {"a": [1]}, lambda: 1


def test_what_pickle_refuses_is_told_when_it_changes_in_place(tmp_path: Path) -> None:
    def change(strategy: Any) -> None:
        strategy.store.inner["a"].append(2)
        next(strategy.source)

    build = lambda: having(store=Store(), source=(i for i in range(3)), same=Store(), make=lambda: 1)  # noqa: E731
    assert resumed(tmp_path, build, change)[1] == {"store": "Store", "source": "generator"}


def test_what_pickle_refuses_may_be_a_circle(tmp_path: Path) -> None:
    def build() -> Any:
        strategy = having(store=Store())
        strategy.store.owner, strategy.store.itself = strategy, strategy.store
        return strategy

    assert resumed(tmp_path, build, lambda s: None)[1] == {}
    assert resumed(tmp_path, build, lambda s: s.store.count.append(1))[1] == {"store": "Store"}


@pytest.mark.parametrize("value", [10**5000, -(10**5000), {10**5000: [1]}, {10**5000: np.zeros(1)}], ids="abcd")
def test_numbers_that_python_does_not_write_come_back(tmp_path: Path, value: Any) -> None:
    assert brought_back(tmp_path, value) == (value, {})


def test_what_is_too_deep_ends_no_run(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    tree: dict[str, Any] = {"children": []}
    tree["children"].append({"parent": tree})
    for value in (deep, tree):
        found, lost = brought_back(tmp_path, value)
        assert found is None
        assert "more than 60 deep" in lost["kept"]


def test_a_strategy_that_is_made_later_is_told(tmp_path: Path) -> None:
    """Its attributes are not taken for those of the one that was there before."""

    def change(strategy: Any) -> None:
        strategy.then = having(kept=5)
        strategy.inner.kept = 3

    found, lost = resumed(tmp_path, lambda: having(then=None, inner=having(kept=1)), change)
    assert lost == {"then": "FedAvg"}
    assert (found.then, found.inner.kept) == (None, 3)


def test_which_of_its_strategies_one_uses_is_kept(tmp_path: Path) -> None:
    def change(strategy: Any) -> None:
        strategy.now, strategy.gone = strategy.second, None

    def build() -> Any:
        first, second = having(kept=1), having(kept=2)
        return having(now=first, first=first, second=second, gone=having(kept=3))

    found, lost = resumed(tmp_path, build, change)
    assert found.now is found.second
    assert (found.now.kept, found.gone, lost) == (2, None, {})


@pytest.mark.parametrize(
    ("kinds", "entry", "attribute"),
    [({"1/kept": "array"}, "strategy.1/kept.", "1/kept"), ({"kept": "numbered"}, "strategy.kept.False", "kept")],
    ids=["another strategy", "bool keys"],
)
def test_what_an_older_checkpoint_cannot_give_is_told(kinds: dict[str, str], entry: str, attribute: str) -> None:
    with pytest.raises(StorageError, match=f"the strategy's attribute {attribute} cannot be restored"):
        recall(FedAvg(), State({entry: np.zeros(1)}, {"kinds": kinds}), [])


# ---- the arrays that a strategy got -------------------------------------------------------------------------------


def begun(**settings: Any) -> Flwr:
    LocalGrid(client_app, 1, {})
    method = Flwr(clients_per_round=2, **settings)
    method.begin({"w": np.float32([1]), "a": np.float32([2])}, {"w", "a"})
    return method


def go(method: Flwr, number: int) -> dict[str, list[float]]:
    """Do a round with two uploads and return the model."""
    current = Round(number, 0, (0, 1), 0)
    method.dispatch(current)
    arrays = [{"w": np.float32([number + i]), "a": np.float32([3 * i])} for i in range(2)]
    method.aggregate(
        current, [Upload(i, i, arrays[i], {}, 10, {"norm_bit": float(i), "train-loss": 1.0}) for i in range(2)]
    )
    return {name: array.tolist() for name, array in method.global_model().items()}


NOISY = "DifferentialPrivacy{}SideAdaptiveClipping", "DifferentialPrivacy{}SideFixedClipping"


@pytest.mark.parametrize("name", [one.format(side) for one in NOISY for side in ("Server", "Client")])
def test_momentum_inside_noise_goes_on(tmp_path: Path, name: str) -> None:
    """FedAvgM keeps its own model, which has no noise."""
    inner = {"strategy": "FedAvgM", "arguments": {"server_momentum": 0.9, "server_learning_rate": 0.5}}
    arguments = {"strategy": inner, "noise_multiplier": 0.1}
    arguments |= {"clipping_norm": 1.0} if "Fixed" in name else {}
    whole, again = begun(name=name, arguments=arguments), begun(name=name, arguments=arguments)
    go(whole, 1), go(whole, 2)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(2, whole.checkpoint(), {"run": "r"})
    again.resume(checkpoints.load(2)[0])
    assert go(whole, 3) == go(again, 3)


@pytest.mark.parametrize("name", ["FedAdam", "FedAvgM", "QFedAvg"])
def test_what_is_sent_anew_is_not_stored(name: str) -> None:
    arguments = {"QFedAvg": {"client_learning_rate": 0.1}, "FedAvgM": {"server_momentum": 0.5}}.get(name, {})
    method = begun(name=name, arguments=arguments)
    go(method, 1)
    state = method.checkpoint()
    assert not [entry for entry in state.arrays if "current_arrays" in entry]
    assert not {"attributes", "orders", "shared", "same", "deleted"} & set(state.values)


def test_a_record_of_arrays_and_an_attribute_of_that_name_come_back(tmp_path: Path) -> None:
    def change(strategy: Any) -> None:
        strategy.current_arrays = ArrayRecord({"z": Array(np.float32([1])), "a": Array(np.int8([[2]]))})

    found, lost = resumed(tmp_path, lambda: having(current_arrays=None), change)
    assert {name: (array.numpy().tolist(), array.dtype) for name, array in found.current_arrays.items()} == {
        "z": ([1.0], "float32"),
        "a": ([[2]], "int8"),
    }
    assert (list(found.current_arrays), type(found.current_arrays), lost) == (["z", "a"], ArrayRecord, {})
    found, _ = resumed(tmp_path, lambda: having(current_arrays=None), lambda s: setattr(s, "current_arrays", 7))
    assert found.current_arrays == 7
