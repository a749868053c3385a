"""Solo: every client trains alone, without federation; a lower bound for federated methods."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fedcross.core.settings import Settings
from fedcross.strategies.method import Evaluation, Round, Start, Task, Upload
from fedcross.strategies.objective import Objective, Outcome, Prepared, Trained, Visit, as_arrays
from fedcross.strategies.parts.single_model import ModelState, SingleModel
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
    FedAvg client would.

    A round's test accuracy and loss are the uniform mean over this round's participants, each evaluated with its own
    model on the central test set after training; a round without valid uploads reports none. There is no global model:
    `global_model`, and so ``model.safetensors``, is the initial one, and ``evaluate_clients`` is refused; with
    ``evaluate_local`` the participants score their own models.

    State: the initial model; every client keeps its model (one model on its disk, from its last accepted visit). Wire:
    one model each way, as for other methods. A client uses the received model only at its first visit, and the server
    only evaluates the uploads; training itself needs neither.
    """

    #: Every client trains its own model, so the sizes of their updates cannot be compared.
    comparable = False
    personal = True

    Objective = Alone

    def init(self, start: Start) -> SoloState:
        """Keep the initial model."""
        return SoloState(super().init(start).model)

    def dispatch(self, state: SoloState, round: Round) -> list[Task]:
        """Send the initial model; no other client can train in a client's place."""
        return [replace(task, fixed=True) for task in super().dispatch(state, round)]

    def aggregate(self, state: SoloState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Keep the participants' models for this round's evaluation."""
        state.seen = [upload.arrays for upload in uploads]
        return {}

    def evaluation(self, state: SoloState) -> Evaluation:
        """Return the models of this round's participants."""
        return Evaluation(state.seen)
