"""Pools of tiny models, one number per entry, for tests of the methods with one model per slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedcross.strategies.method import Round, Upload
from fedcross.strategies.parts.pooled import Slots
from fedcross.strategies.wire.records import Arrays
from tests.support.game import Game


def model(value: float, entries: int = 3, count: int = 0) -> Arrays:
    """Return a model with `entries` parameters of two numbers, a running mean of one, and a batch counter."""
    arrays = {f"w{i}": np.full(2, value + 100 * i, np.float32) for i in range(entries)}
    return {**arrays, "mean": np.full(1, value, np.float32), "n": np.array(count, np.int64)}


def begun(kind: type[Slots], k: int, start: Arrays | None = None, **values: Any) -> Any:
    """Return a method with k slots that start from `start`, a model of zeros unless given."""
    first = model(0.0) if start is None else start
    return Game(kind, first, {name for name in first if name.startswith("w")}, clients_per_round=k, **values)


def feed(method: Any, number: int, uploads: dict[int, Arrays], seed: int = 3) -> dict[str, float]:
    """Aggregate these uploads by slot and return the metrics."""
    sent = [Upload(slot, slot, arrays, {}, 1, {}) for slot, arrays in sorted(uploads.items())]
    metrics: dict[str, float] = method.aggregate(Round(number, 0, tuple(range(len(method.pool))), seed), sent)
    return metrics


def draws(count: int, seed: int, slots: Sequence[int] | None = None) -> dict[int, Arrays]:
    """Return random uploads with different counters, by slot."""
    generator = np.random.default_rng(seed)
    made = {}
    for slot in range(count) if slots is None else slots:
        one = model(0.0, count=int(generator.integers(1, 50)))
        made[slot] = {
            name: array if array.dtype.kind == "i" else generator.normal(size=array.shape).astype(np.float32)
            for name, array in one.items()
        }
    return made


def check_state(kind: type[Slots], k: int = 4, **values: Any) -> None:
    """Assert that a method restored from a checkpoint goes on as the one that wrote it, to the bit."""
    one, other = begun(kind, k, **values), begun(kind, k, **values)
    for number in (1, 2):
        feed(one, number, draws(k - 1, number))
    saved = one.checkpoint()
    saved.arrays = {name: array.copy() for name, array in saved.arrays.items()}
    other.resume(saved)
    for number in (3, 4, 5):
        first = [feed(method, number, draws(k - 1, number)) for method in (one, other)]
        assert first[0] == first[1]
        sent = [method.dispatch(Round(number + 1, 0, tuple(range(k)), 3)) for method in (one, other)]
        for a, b in zip(*sent, strict=True):
            assert a.slot == b.slot
            assert all((a.arrays[name] == b.arrays[name]).all() for name in a.arrays)
    ours, theirs = one.global_model(), other.global_model()
    assert all((ours[name] == theirs[name]).all() for name in ours)
    assert one.queue == other.queue


def check_empty(kind: type[Slots], **values: Any) -> None:
    """Assert that a round without uploads changes nothing."""
    method = begun(kind, 3, **values)
    feed(method, 1, draws(3, 1))
    before = method.pool.rows.copy()
    assert feed(method, 2, {}) == {}
    assert (method.pool.rows == before).all()
