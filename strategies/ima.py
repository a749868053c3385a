"""IMA: in the last part of a run, the mean of the last global models is sent and evaluated."""

from dataclasses import dataclass, field

from pydantic import Field

from fedcross.strategies.method import Arrays, Round, Settings, Upload
from fedcross.strategies.objective import Objective, Prepared, Visit
from fedcross.strategies.parts.averaging import first_late, weighted_mean
from fedcross.strategies.parts.single_model import ModelState, SingleModel


class IMAParams(Settings):
    start: float = Field(0.75, ge=0, le=1)
    window: int = Field(5, ge=1)
    lr_decay: float = Field(0.97, gt=0, le=1)


class Milder(Objective[IMAParams]):
    def prepare(self, visit: Visit) -> Prepared:
        before = visit.round - first_late(visit.rounds, self.params.start)
        visit.lr *= self.params.lr_decay ** max(0, before)
        return {}


@dataclass
class IMAState(ModelState):
    window: list[Arrays] = field(default_factory=list)


class IMA(SingleModel[IMAParams, IMAState]):
    """Zhou et al., Understanding and Improving Model Averaging in Federated Learning on Heterogeneous Data, TMC 2024.

    Also arXiv 2305.07845; iterative moving averaging. Each round the uploads are averaged as in FedAvg, by examples.
    After 75 % of the rounds clients get, and evaluation uses, the uniform mean of the last P such averages; meanwhile
    the clients' learning rate falls by 3 % a round.

    State: the model that is sent and the last P averages; clients keep none. Wire: one model down, one up.

    As in the authors' code (TailinZhou/FedIMA) the window holds the averages, not the means that were sent.

    Deviations: a window that is not full is averaged as it is. Statistics of batch normalisation are averaged like
    weights. If an upload is lost, the average is over the others; a round without uploads changes nothing.
    """

    Objective = Milder

    def step(self, state: IMAState, round: Round, uploads: list[Upload], sent: Arrays) -> None:
        state.window = [*state.window, state.model][-self.params.window :]
        if round.number >= first_late(round.rounds, self.params.start):
            state.model = weighted_mean(state.window, [1.0] * len(state.window))
