"""Packing: every kind of value comes back, and what cannot be packed is named."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.files import dumps_exact, loads_exact
from fedcross.strategies.pool.pool import Layout, Pool
from fedcross.strategies.round.packing import Packed, pack, unpack


class Pair(NamedTuple):
    a: int
    b: float


@dataclass
class Inner:
    values: list[np.ndarray]
    count: int = 0


@dataclass
class State:
    model: dict[str, np.ndarray] = field(default_factory=dict)
    inner: Inner = field(default_factory=lambda: Inner([]))
    by_number: dict[int, float] = field(default_factory=dict)
    by_pair: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    pair: Pair = field(default_factory=lambda: Pair(0, 0.0))
    names: tuple[str, ...] = ()
    seen: set[int] = field(default_factory=set)
    odd: Any = None


FULL = State(
    {"w": np.arange(3.0), "n": np.array(2)}, Inner([np.ones(2, np.float32), np.array([True])], 3), {4: 0.5},
    {(1, "a"): [1, 2]}, Pair(1, 2.5), ("x", "y"), {3, 1}, [None, True, "text", np.float64(1.5)],
)  # fmt: skip


def same(a, b):
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and (a == b).all()
    return repr(a) == repr(b)


def test_pools_in_dictionaries_and_tuples_come_back():
    def pool(value):
        made = Pool(Layout.of({"w": np.zeros(2, np.float32)}), 1)
        made.write(0, {"w": np.full(2, value, np.float32)})
        return made

    packed = pack(State(odd={"a": pool(1), 2: (pool(3), [pool(4)])}))
    again = unpack(packed, State(odd={"a": pool(0), 2: (pool(0), [pool(0)])})).odd
    found = [again["a"], again[2][0], again[2][1][0]]
    assert [one.model(0)["w"].tolist() for one in found] == [[1, 1], [3, 3], [4, 4]]


def test_two_arrays_of_one_name_are_refused():
    with pytest.raises(ConfigError, match=r"a\.b"):
        pack(State(odd={"a.b": np.zeros(1), "a": {"b": np.ones(1)}}))


def test_every_kind_comes_back():
    packed = pack(FULL)
    again = unpack(Packed(packed.arrays, loads_exact(dumps_exact(packed.values))), State())
    assert all(same(again.model[name], array) for name, array in FULL.model.items())
    assert all(map(same, again.inner.values, FULL.inner.values))
    assert again.inner.count == 3
    for name in ("by_number", "by_pair", "pair", "names", "seen"):
        assert getattr(again, name) == getattr(FULL, name)
    assert isinstance(again.pair, Pair)
    assert again.odd == [None, True, "text", 1.5]


def test_one_array_in_two_places_is_stored_once():
    array = np.zeros(4)
    packed = pack(State({"a": array, "b": array}))
    assert list(packed.arrays) == ["model.a"]
    again = unpack(packed, State())
    assert again.model["a"] is again.model["b"]


def test_a_pool_is_loaded_into_the_fresh_one():
    model = {"w": np.zeros(3, np.float32)}

    def pooled(value):
        pool = Pool(Layout.of(model, ("w",)), 2)
        pool.rows[:] = value
        return pool

    fresh = pooled(0)
    again = unpack(pack(State(odd=pooled(5))), State(odd=fresh))
    assert again.odd is fresh
    assert (fresh.rows == 5).all()


@pytest.mark.parametrize("value", [object(), np.array(["text"]), {"deep": [object()]}, 1j, print])
def test_what_cannot_be_packed_is_named_with_its_field(value):
    with pytest.raises(ConfigError, match=r"State\.odd"):
        pack(State(odd=value))


def test_a_state_of_another_class_or_version_is_refused():
    with pytest.raises(StorageError, match="Inner"):
        unpack(pack(Inner([])), State())
    packed = pack(State())
    packed.values["renamed"] = packed.values.pop("names")
    with pytest.raises(StorageError, match="version"):
        unpack(packed, State())


@pytest.mark.parametrize("name", ["subprocess:Popen", "builtins:exec", "tests.support.nowhere:State"])
def test_a_foreign_file_calls_nothing_but_classes_of_states(name):
    packed = pack(State(inner=Inner([])))
    packed.values["inner"]["values"] = [{"$class": name, "args": ["false"]}]
    with pytest.raises(StorageError):
        unpack(packed, State())
