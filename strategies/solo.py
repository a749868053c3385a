"""Solo: every client trains alone; the lower reference, what nobody gains from anybody."""

from __future__ import annotations

from fedcross.core.settings import Settings
from fedcross.strategies.parts.objective import Objective, Outcome, Prepared, Trained, Visit, as_arrays
from fedcross.strategies.round.single_model import SingleModel
from fedcross.strategies.wire.protocol import Round, Upload
from fedcross.strategies.wire.records import Arrays


class Alone(Objective[Settings]):
    """Cross-entropy, continued from the client's own model."""

    keeps = True

    def start(self, received: Arrays, state: Arrays) -> Arrays:
        """Return the client's own model; the received one the first time."""
        return state or received

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        """Keep the whole model."""
        return Outcome(state=as_arrays({**trained.params, **trained.buffers}))


class Solo(SingleModel[Settings]):
    """Local training only, a reference rather than a method: models are never averaged.

    All clients start from the same initial model. A client that is drawn trains its own model further, as long as a
    FedAvg client would.

    A round's test accuracy and loss are the uniform mean over this round's participants, each with its own model on the
    central test set, after training; nothing is reported for a round that lost all of them. There is no global model:
    `global_model`, and so ``model.safetensors``, is the initial one.

    State: the initial model; every client keeps its model (one model on its disk, from its last accepted visit). Wire:
    the house's protocol carries one model each way; down only the first one of a client is used, up it is only
    measured. Training itself needs neither.
    """

    #: Every client trains its own model, so there is no common size of an update to judge by.
    defended = False
    interchangeable = False

    Objective = Alone

    def setup(self, arrays: Arrays) -> None:
        """Keep the initial model."""
        super().setup(arrays)
        self._seen: list[Arrays] = []

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Hold the participants' models for this round's evaluation; change nothing."""
        self._seen = [upload.arrays for upload in uploads]
        return {}

    def evaluation_models(self) -> list[Arrays]:
        """Return the models of this round's participants."""
        return self._seen
