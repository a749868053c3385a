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
