"""Bases of methods with one global model: with a uniform mean, and with the number N of all clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from typing_extensions import TypeVar

from fedcross.strategies.method import Round, Upload
from fedcross.strategies.objective import P
from fedcross.strategies.parts.single_model import M, ModelState, SingleModel


class Uniform(SingleModel[P, M]):
    """Base of methods whose mean of the uploads is uniform."""

    def weights(self, uploads: list[Upload]) -> list[float]:
        """Return 1 for each upload."""
        return [1.0] * len(uploads)


@dataclass
class PopulationState(ModelState):
    """The global model, and N, the most clients that were connected at a draw."""

    population: int = 0


N = TypeVar("N", bound=PopulationState, default=PopulationState)


class Population(SingleModel[P, N]):
    """Base of methods that know N."""

    def sample(self, state: N, round: Round, available: Sequence[int]) -> tuple[int, ...]:
        """Draw as every method does, and store the largest number of connected clients so far."""
        state.population = max(state.population, len(available))
        return round.clients
