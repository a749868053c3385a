"""IMA: in the last part of a run, the mean of the last global models is sent and evaluated."""

from __future__ import annotations

from pydantic import Field

from fedcross.core.settings import Settings
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.late import first_late
from fedcross.strategies.parts.objective import Objective, Prepared, Visit
from fedcross.strategies.round.federation import State
from fedcross.strategies.round.single_model import SingleModel
from fedcross.strategies.wire.protocol import Round, Upload
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


class IMA(SingleModel[IMAParams]):
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

    def setup(self, arrays: Arrays) -> None:
        """Keep the initial model; the window is empty."""
        super().setup(arrays)
        self.window: list[Arrays] = []

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Average the uploads; late in the run, send the mean of the last averages."""
        metrics = super().aggregate(current, uploads)
        if uploads:
            self.window = [*self.window, self.model][-self.params.window :]
            if current.number >= first_late(self.federation.rounds, self.params.start):
                self.model = weighted_mean(self.window, [1.0] * len(self.window))
        return metrics

    def state(self) -> State:
        """Return the model that is sent and the window, the oldest average first."""
        state = super().state()
        for i, model in enumerate(self.window):
            state.arrays |= {f"window.{i}.{name}": array for name, array in model.items()}
        state.values["window"] = len(self.window)
        return state

    def restore(self, state: State) -> None:
        """Load what :meth:`state` returned."""
        super().restore(state)
        self.window = [
            {name: state.arrays[f"window.{i}.{name}"] for name in self.spec} for i in range(state.values["window"])
        ]
