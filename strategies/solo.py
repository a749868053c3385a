"""Solo: every client trains alone, without federation; a lower bound for federated methods."""

from __future__ import annotations

from dataclasses import dataclass, field

from fedcross.core.settings import Settings
from fedcross.strategies.method import Evaluation, Round, Task, Upload
from fedcross.strategies.objective import Objective, Outcome, Prepared, Trained, Visit, as_arrays
from fedcross.strategies.parts.single_model import ModelState, SingleModel, to_all
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


@dataclass
class SoloState(ModelState):
    """The initial model, and the models of the last round's participants."""

    seen: list[Arrays] = field(default_factory=list)


class Solo(SingleModel[Settings, SoloState]):
    """Local training only, a reference rather than a method: models are never averaged.

    All clients start from the same initial model. A drawn client trains its own model further, for as many epochs as a
    FedAvg client would. A round's accuracy and loss are the uniform mean over its participants, each with its own
    trained model on the central test set; a round without uploads reports none. `global_model`, and so
    ``model.safetensors``, is the initial model. ``evaluate_clients`` is refused; with ``evaluate_local`` the
    participants score their own models.

    State: the initial model; every client keeps the model of its last accepted visit. Wire: one model each way, as for
    other methods, though a client needs the received one only at its first visit and the server only evaluates uploads.
    """

    #: Every client trains its own model, so the sizes of their updates cannot be compared.
    comparable = False
    personal = True

    Objective = Alone
    State = SoloState

    def dispatch(self, state: SoloState, round: Round) -> list[Task]:
        """Send the initial model; no other client can train in a client's place."""
        return to_all(state.model, round, fixed=True)

    def aggregate(self, state: SoloState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Keep the participants' models for this round's evaluation."""
        state.seen = [upload.arrays for upload in uploads]
        return {}

    def evaluation(self, state: SoloState) -> Evaluation:
        """Return the models of this round's participants."""
        return Evaluation(state.seen)
