"""Pools of tiny models, one number per entry, for tests of the methods with one model per slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedcross.strategies.method import Round, Upload
from fedcross.strategies.parts.pooled import Pooled
from fedcross.strategies.wire.records import Arrays
from tests.support.game import Game


def model(value: float, entries: int = 3, count: int = 0) -> Arrays:
    """Return a model with `entries` parameters of two numbers, a running mean of one, and a batch counter."""
    arrays = {f"w{i}": np.full(2, value + 100 * i, np.float32) for i in range(entries)}
    return {**arrays, "mean": np.full(1, value, np.float32), "n": np.array(count, np.int64)}


def begun(kind: type[Pooled], k: int, start: Arrays | None = None, **values: Any) -> Any:
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
