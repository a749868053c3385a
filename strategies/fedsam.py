"""FedSAM: clients minimise the largest loss near their model (SAM), so that they end in flat minima."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field
from torch import Tensor
from typing_extensions import TypeVar

from fedcross.core.settings import Settings
from fedcross.strategies.method import Round, Start, Upload
from fedcross.strategies.objective import Objective, Prepared, Visit
from fedcross.strategies.parts.averaging import Swa, weighted_mean
from fedcross.strategies.parts.single_model import ModelState, SingleModel
from fedcross.strategies.parts.vectors import scaled
from fedcross.strategies.wire.records import Arrays


class FedSAMParams(Settings):
    """Settings of FedSAM.

    Parameters
    ----------
    rho : float
        Length of the way from the model to the point whose gradient is taken; 0 is FedAvg, without a second gradient.
    swa : Swa, optional
        Average the global models of the last rounds; null: do not.
    """

    rho: float = Field(0.1, ge=0)
    swa: Swa | None = None


S = TypeVar("S", bound=FedSAMParams, default=FedSAMParams)


class Sharpness(Objective[S]):
    """Cross-entropy, whose gradient is taken at ``w + rho g/|g|``."""

    def prepare(self, visit: Visit) -> Prepared:
        """Set the learning rate of the averaging's cycle."""
        if (swa := self.params.swa) is not None:
            visit.lr = swa.rate(visit.lr, visit.round, visit.rounds)
        return {}

    def ascent(self, flat: Tensor, gradient: Tensor, prepared: Prepared) -> Tensor | None:
        """Return ``rho g/|g|``."""
        rho = self.params.rho
        return scaled(gradient, rho) if rho else None


@dataclass
class FedSAMState(ModelState):
    """The global model, the average, the number of its models, and the round of the first one."""

    average: Arrays = field(default_factory=dict)
    collected: int = 0
    began: int = 0


class FedSAM(SingleModel[S, FedSAMState]):
    """Caldarola, Caputo and Ciccone, Improving Generalization in Federated Learning by Seeking Flat Minima, ECCV 2022.

    In every step a client computes its gradient g, then the gradient of the same batch at ``w + rho g/|g|``, and takes
    the step from w along the second one. The server averages as FedAvg does, by examples.

    With `swa` the server also keeps the uniform mean of one global model in c rounds of the last quarter of the run and
    evaluates it; clients go on from the newest global model, at a learning rate that falls from ``lr`` to ``swa.lr`` in
    each cycle of c rounds.

    State: the global model; with `swa` the average and the number of its models; clients keep none. Wire: one model
    down, one up. A client computes two gradients a step.

    Compared with the authors' code (debcaldarola/fedsam): statistics of batch normalisation are updated by the first
    pass only, in theirs by both, and dropout draws the same mask in both; their networks for CIFAR have neither. Weight
    decay acts at w, as there. Until the first model is collected the newest global model is evaluated, while theirs
    evaluates the one from the beginning of the averaging. Statistics of batch normalisation are averaged like weights;
    theirs stay those of the first model. The reported training loss is that at w. A lost upload leaves the mean to the
    others; a round without uploads collects nothing. A finished run that is continued with more rounds begins its
    average anew if the first model in it is not of the longer run's last quarter.
    """

    Objective = Sharpness

    def init(self, start: Start) -> FedSAMState:
        """Keep the initial model; no model is in the average yet."""
        return FedSAMState(super().init(start).model)

    def aggregate(self, state: FedSAMState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Average the uploads; where that is due, let the new global model join the average of models."""
        metrics, swa = super().aggregate(state, round, uploads), self.params.swa
        if swa is not None and state.collected and not swa.collects(state.began, round.rounds):
            state.average, state.collected = {}, 0  # of a shorter run's end
        if swa is not None and uploads and swa.collects(round.number, round.rounds):
            state.began = state.began if state.collected else round.number
            both = [state.average, state.model] if state.collected else [state.model]
            state.average = weighted_mean(both, [state.collected, 1.0][-len(both) :])
            state.collected += 1
        return metrics

    def global_model(self, state: FedSAMState) -> Arrays:
        """Return the average of models, or the newest one where there is none."""
        return state.average if state.collected else state.model
