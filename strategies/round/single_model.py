"""Base of methods with one global model: every client gets it, the mean of the uploads replaces it."""

from __future__ import annotations

from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.objective import P
from fedcross.strategies.round.base import Method
from fedcross.strategies.round.federation import State
from fedcross.strategies.wire.protocol import Payload, Round, Upload
from fedcross.strategies.wire.records import Arrays


class SingleModel(Method[P]):
    """Base of methods with one global model: every client gets it, the mean of the uploads replaces it.

    Weights and batch-normalisation statistics are averaged alike. A round without uploads changes nothing.
    """

    interchangeable = True

    def setup(self, arrays: Arrays) -> None:
        """Keep a copy of the initial model as the global one."""
        self.model: Arrays = {name: array.copy() for name, array in arrays.items()}

    def dispatch(self, current: Round) -> list[Payload]:
        """Send the global model to every client of the round."""
        return [Payload(client, slot, self.model) for slot, client in enumerate(current.clients)]

    def weights(self, uploads: list[Upload]) -> list[float]:
        """Return each upload's weight in the mean: its number of examples."""
        return [float(upload.num_examples) for upload in uploads]

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Replace the global model by the weighted mean of the uploads."""
        if uploads:
            self.model = weighted_mean([upload.arrays for upload in uploads], self.weights(uploads))
        return {}

    def global_model(self) -> Arrays:
        """Return the global model."""
        return self.model

    def state(self) -> State:
        """Return the global model."""
        return State({f"model.{name}": array for name, array in self.model.items()})

    def restore(self, state: State) -> None:
        """Load the global model from `state`."""
        self.model = {name: state.arrays[f"model.{name}"] for name in self.spec}
