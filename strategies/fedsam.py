"""FedSAM: clients minimise the largest loss near their model (SAM), so that they end in flat minima."""

from dataclasses import dataclass, field
from typing import Any

from pydantic import Field
from torch import Tensor

from fedcross.strategies.method import Arrays, Round, Settings, Upload
from fedcross.strategies.objective import Objective, Prepared, Visit
from fedcross.strategies.parts.averaging import first_late, weighted_mean
from fedcross.strategies.parts.single_model import ModelState, SingleModel
from fedcross.strategies.parts.vectors import scaled


class Swa(Settings):
    """Settings of stochastic weight averaging on the server.

    It begins after a share `start` of the planned rounds; one global model in c = `cycle` rounds joins the average.
    With c > 1 the clients' learning rate is cyclic and falls to `lr` within each cycle.
    """

    start: float = Field(0.75, ge=0, le=1)
    cycle: int = Field(10, ge=1)
    lr: float = Field(1e-4, gt=0)

    def collects(self, number: int, rounds: int) -> bool:
        """Return whether the global model of round `number` joins the average."""
        late = number - first_late(rounds, self.start)
        return late > 0 and late % self.cycle == 0

    def rate(self, lr: float, number: int, rounds: int) -> float:
        """Return the learning rate of round `number` where it would be `lr` without averaging.

        ``(1 - t) lr + t self.lr`` with ``t = (i mod c + 1)/c``, i the round counted from 0.
        """
        if self.cycle == 1 or number < first_late(rounds, self.start):
            return lr
        t = ((number - 1) % self.cycle + 1) / self.cycle
        return (1 - t) * lr + t * self.lr


class FedSAMParams(Settings):
    rho: float = Field(0.1, ge=0)
    swa: Swa | None = None


class Uphill(Objective[Any]):
    """SAM's part of an objective: the gradient is taken at ``w + rho g/|g|``; with rho 0 there is no second pass."""

    def ascent(self, flat: Tensor, gradient: Tensor, prepared: Prepared) -> Tensor | None:
        return scaled(gradient, self.params.rho) if self.params.rho else None


class Sharpness(Uphill):
    def prepare(self, visit: Visit) -> Prepared:
        if (swa := self.params.swa) is not None:
            visit.lr = swa.rate(visit.lr, visit.round, visit.rounds)
        return {}


@dataclass
class FedSAMState(ModelState):
    """The global model, the average, the number of its models, and the round of the first one."""

    average: Arrays = field(default_factory=dict)
    collected: int = 0
    began: int = 0


class FedSAM(SingleModel[FedSAMParams, FedSAMState]):
    """Caldarola, Caputo and Ciccone, Improving Generalization in Federated Learning by Seeking Flat Minima, ECCV 2022.

    In every step a client takes the gradient of the batch at ``w + rho g/|g|``, g the one at w, and steps from w along
    it. The server averages as FedAvg does, by examples. With `swa` it evaluates the uniform mean of one global model in
    c rounds of the last quarter of the run; clients go on from the newest one, at a learning rate that falls from
    ``lr`` to ``swa.lr`` in each cycle of c rounds.

    State: G; with `swa` the average and the number of its models. Wire: FedAvg's. A client takes two gradients a step.
    Deviations from the authors' code (debcaldarola/fedsam): statistics of batch normalisation are updated by the first
    pass only and averaged like weights; dropout draws the same mask in both. Until the first model is collected the
    newest one is evaluated. The reported training loss is that at w. A run continued with more rounds begins its
    average anew if the first model in it is not of the longer run's last quarter.
    """

    Objective = Sharpness

    def aggregate(self, state: FedSAMState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        super().aggregate(state, round, uploads)
        if (swa := self.params.swa) is None:
            return {}
        if state.collected and not swa.collects(state.began, round.rounds):
            state.average, state.collected = {}, 0  # of a shorter run's end
        if uploads and swa.collects(round.number, round.rounds):
            state.began = state.began if state.collected else round.number
            both = [state.average, state.model] if state.collected else [state.model]
            state.average = weighted_mean(both, [state.collected, 1.0][-len(both) :])
            state.collected += 1
        return {}

    def global_model(self, state: FedSAMState) -> Arrays:
        return state.average if state.collected else state.model
