"""FedAvg: one global model, the mean of what the clients trained, weighted by their examples."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from strategies.averaging import weighted_mean
from strategies.base import Method
from strategies.federation import State
from strategies.objective import P
from strategies.protocol import Payload, Round, Upload
from strategies.wire import Arrays
from tasks.settings import Settings


class SingleModel(Method[P]):
    """Base of methods with one global model: everyone gets it, the mean of the uploads replaces it.

    Weights and batch-normalisation statistics are averaged alike. A round without uploads changes nothing.
    """

    interchangeable = True

    def setup(self, arrays: Arrays) -> None:
        """Keep a copy of the initial model as the global one."""
        self.model: Arrays = {name: array.copy() for name, array in arrays.items()}

    def dispatch(self, current: Round) -> list[Payload]:
        """Send the global model to everyone."""
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
        """Take over the global model."""
        self.model = {name: state.arrays[f"model.{name}"] for name in self.spec}


class FedAvgParams(Settings):
    """``weighting``: by ``examples`` (n_k, the paper) or ``uniform``."""

    weighting: Literal["examples", "uniform"] = Field("examples", description="weight of an upload in the mean")


class FedAvg(SingleModel[FedAvgParams]):
    """McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.

    ``G <- sum_k n_k w_k / sum_k n_k`` over this round's uploads.

    State: the global model; clients keep none. Wire: one model down, one up.
    """

    def weights(self, uploads: list[Upload]) -> list[float]:
        """Return n_k, or 1 for a uniform mean."""
        if self.params.weighting == "uniform":
            return [1.0] * len(uploads)
        return super().weights(uploads)
