"""The average of a method's global models over the rounds (``average=ema`` or ``tail``): evaluated, never sent.

With G_r the global model after round r: ``ema`` is ``A_1 = G_1``, ``A_r = d A_{r-1} + (1 - d) G_r``; ``tail`` is the
mean of all G_r with ``r > f rounds``, and G_r itself before. Entries that are no floats are the newest ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedcross.strategies.parts.averaging import first_late
from fedcross.strategies.round.settings import AverageSettings
from fedcross.strategies.wire.records import Arrays


@dataclass
class Average:
    """The average so far, and how many global models are in it."""

    model: Arrays
    count: int


def averaged(settings: AverageSettings, before: Average | None, model: Arrays, number: int, rounds: int) -> Average:
    """Return the average after round `number` of `rounds`, whose global model is `model`; `before` is not changed."""
    if before is None or (settings.average == "tail" and number <= first_late(rounds, settings.average_from)):
        return Average({name: np.array(array) for name, array in model.items()}, 1)
    count = before.count + 1
    share = 1 - settings.average_decay if settings.average == "ema" else 1 / count
    found = {
        name: old + array.dtype.type(share) * (array - old) if array.dtype.kind == "f" else np.array(array)
        for (name, array), old in zip(model.items(), before.model.values())
    }
    return Average(found, count)
