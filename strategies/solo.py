"""Solo: every client trains alone, without federation; a lower bound for federated methods."""

from dataclasses import dataclass, field

from fedcross.strategies.method import Arrays, Evaluation, Round, Settings, Task, Upload
from fedcross.strategies.objective import Objective, Outcome, Prepared, Trained, Visit, as_arrays
from fedcross.strategies.parts.single_model import ModelState, SingleModel, to_all


class Alone(Objective[Settings]):
    """Cross-entropy, continued from the client's own model; from the received one the first time."""

    keeps = True

    def start(self, received: Arrays, state: Arrays) -> Arrays:
        return state or received

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        return Outcome(state=as_arrays({**trained.params, **trained.buffers}))


@dataclass
class SoloState(ModelState):
    seen: list[Arrays] = field(default_factory=list)


class Solo(SingleModel[Settings, SoloState]):
    """Local training only, a reference rather than a method: models are never averaged.

    All clients start from the same initial model; a drawn client trains its own model further. A round's accuracy and
    loss are the uniform mean over its participants, each with its own trained model on the central test set; a round
    without uploads reports none. ``model.safetensors`` is the initial model. ``evaluate_clients`` is refused.

    State: the initial model; every client keeps the model of its last accepted visit. Wire: one model each way.
    """

    comparable = False
    personal = True
    Objective = Alone

    def dispatch(self, state: SoloState, round: Round) -> list[Task]:
        return to_all(state.model, round, fixed=True)

    def aggregate(self, state: SoloState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        state.seen = [upload.arrays for upload in uploads]
        return {}

    def evaluation(self, state: SoloState) -> Evaluation:
        return Evaluation(state.seen)
