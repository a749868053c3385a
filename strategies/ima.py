"""IMA: in the last part of a run, the mean of the last global models is sent and evaluated."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import Field

from fedcross.core.settings import Settings
from fedcross.strategies.method import Round, Start, Upload
from fedcross.strategies.objective import Objective, Prepared, Visit
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.late import first_late
from fedcross.strategies.parts.single_model import ModelState, SingleModel
from fedcross.strategies.wire.records import Arrays


class IMAParams(Settings):
    """Settings of IMA.

    Parameters
    ----------
    start : float
        Share of the planned rounds after which averaging begins, 0 to 1; with 1 it never does (FedAvg).
    window : int
        P: number of global models in the mean.
    lr_decay : float
        Factor on the learning rate in each round of the averaging; 1 leaves the clients' training as it is.
    """

    start: float = Field(0.75, ge=0, le=1)
    window: int = Field(5, ge=1)
    lr_decay: float = Field(0.97, gt=0, le=1)


class Milder(Objective[IMAParams]):
    """Cross-entropy, at a learning rate that falls while models are averaged."""

    def prepare(self, visit: Visit) -> Prepared:
        """Lower the learning rate by one factor for each averaged round before this one."""
        before = visit.round - first_late(visit.rounds, self.params.start)
        visit.lr *= self.params.lr_decay ** max(0, before)
        return {}


@dataclass
class IMAState(ModelState):
    """The model that is sent, and the last P averages, the oldest first."""

    window: list[Arrays] = field(default_factory=list)


class IMA(SingleModel[IMAParams, IMAState]):
    """Zhou et al., Understanding and Improving Model Averaging in Federated Learning on Heterogeneous Data, TMC 2024.

    Also arXiv 2305.07845; iterative moving averaging.

    Each round the uploads are averaged as in FedAvg, by examples. From 75 % of the rounds on the uniform mean of the
    last P such averages is what clients get and what is evaluated; meanwhile the clients' learning rate falls by 3 % a
    round.

    State: the model that is sent and the last P averages; clients keep none. Wire: one model down, one up.

    The rules are those of the authors' code (TailinZhou/FedIMA), where the window holds the averages themselves, not
    the means that were sent. ``lr_decay=1`` is the averaging alone.

    Deviations: a window that is not full yet is averaged as it is. Statistics of batch normalisation are averaged like
    weights. If an upload is lost, the round's average is over the others; a round without uploads changes nothing.
    """

    Objective = Milder

    def init(self, start: Start) -> IMAState:
        """Keep the initial model; the window is empty."""
        return IMAState(super().init(start).model)

    def aggregate(self, state: IMAState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Average the uploads; late in the run, send the mean of the last averages."""
        metrics = super().aggregate(state, round, uploads)
        if uploads:
            state.window = [*state.window, state.model][-self.params.window :]
            if round.number >= first_late(round.rounds, self.params.start):
                state.model = weighted_mean(state.window, [1.0] * len(state.window))
        return metrics
