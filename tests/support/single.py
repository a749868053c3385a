"""Rounds of methods with one global model, without clients: uploads in, checkpoints out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedcross.strategies.method import Method, Round, Upload
from fedcross.strategies.wire.records import Arrays
from tests.support.game import Game


def begun(kind: type[Method], initial: float = 0.0, **values: Any) -> Any:
    """Return a method whose model is one parameter of two numbers, a running mean and a counter."""
    return Game(kind, arrays(initial), {"w"}, **values)


def arrays(w: Any, mean: float = 0.0, count: int = 0) -> Arrays:
    """Return such a model; a number `w` stands for both numbers."""
    return {"w": np.full(2, w, np.float32) if np.isscalar(w) else np.float32(w), "mean": np.float32([mean]),
            "n": np.array(count, np.int64)}  # fmt: skip


def feed(
    method: Any, number: int, *models: Arrays, examples: Any = None, extras: Mapping[int, Any] | None = None
) -> dict[str, float]:
    """Aggregate these uploads and return the metrics."""
    counts = examples or [1] * len(models)
    sent = [Upload(i, i, m, (extras or {}).get(i, {}), counts[i], {}) for i, m in enumerate(models)]
    metrics: dict[str, float] = method.aggregate(Round(number, 0, tuple(range(len(sent))), 0), sent)
    return metrics


def check_state(kind: type[Method], extras: Mapping[int, Any] | None = None, **values: Any) -> None:
    """Assert that a method restored from a checkpoint goes on as the one that wrote it; check an empty round too."""
    generator = np.random.default_rng(4)

    def models() -> list[Arrays]:
        return [arrays(generator.normal(size=2), mean=generator.normal(), count=i) for i in range(3)]

    one, other = begun(kind, **values), begun(kind, **values)
    one.sample(1, range(5))
    for number in range(1, 8):
        uploads = models()
        feed(one, number, *uploads, extras=extras)
        if number >= 5:
            feed(other, number, *uploads, extras=extras)
        before = {name: array.copy() for name, array in one.global_model().items()}
        assert feed(one, number) == {}
        assert all((before[name] == array).all() for name, array in one.global_model().items())
        if number == 4:
            saved = one.checkpoint()
            other.resume(saved)
    for method in (one, other):
        method.final = [method.global_model(), *(p.arrays for p in method.dispatch(Round(8, 0, (0,), 0)))]
    for a, b in zip(one.final, other.final, strict=True):
        assert list(a) == list(b)
        assert all(a[name].dtype == b[name].dtype and (a[name] == b[name]).all() for name in a)
    assert one.checkpoint().values == other.checkpoint().values
