"""Base of methods with one global model: every client gets it, the mean of the uploads replaces it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from typing_extensions import TypeVar

from fedcross.strategies.method import GLOBAL, Method, Round, Start, Task, Upload
from fedcross.strategies.objective import P
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.wire.records import Arrays


@dataclass
class ModelState:
    """The global model."""

    model: Arrays


M = TypeVar("M", bound=ModelState, default=Any)


class SingleModel(Method[P, M]):
    """Base of methods with one global model: every client gets it, the mean of the uploads replaces it.

    Weights and batch-normalisation statistics are averaged alike. A round without uploads changes nothing.
    """

    def init(self, start: Start) -> M:
        """Return a state with a copy of the initial model."""
        return cast("M", ModelState({name: array.copy() for name, array in start.arrays.items()}))

    def dispatch(self, state: M, round: Round) -> list[Task]:
        """Send the global model to every client of the round."""
        return [Task(client, slot, state.model, stream=GLOBAL) for slot, client in enumerate(round.clients)]

    def weights(self, uploads: list[Upload]) -> list[float]:
        """Return each upload's weight in the mean: its number of examples."""
        return [float(upload.num_examples) for upload in uploads]

    def aggregate(self, state: M, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Replace the global model by the weighted mean of the uploads."""
        if uploads:
            state.model = weighted_mean([upload.arrays for upload in uploads], self.weights(uploads))
        return {}

    def global_model(self, state: M) -> Arrays:
        """Return the global model."""
        return state.model
