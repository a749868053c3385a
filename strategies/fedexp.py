"""FedExP: the server extrapolates the mean update by as much as the clients' updates disagree."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from pydantic import Field

from fedcross.strategies.method import Arrays, Round, Settings, Upload
from fedcross.strategies.parts.averaging import move, squared_distance
from fedcross.strategies.parts.single_model import ModelState, SingleModel


class FedExPParams(Settings):
    epsilon: float = Field(1e-3, ge=0)
    weighting: Literal["examples", "uniform"] = "examples"
    most: float | None = Field(None, ge=1)
    last_two: bool = True


@dataclass
class FedExPState(ModelState):
    """The global model, the parameters of the one before, and whether a round has moved it."""

    before: Arrays = field(default_factory=dict)
    moved: bool = False


class FedExP(SingleModel[FedExPParams, FedExPState]):
    """Jhunjhunwala, Wang and Joshi, FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023.

    With the updates ``d_u = w_u - w`` and their mean d the server sets ``w += eta_g d``, ``eta_g = max(1, mean
    ||d_u||^2 / (2 (||d||^2 + epsilon)))``; the paper's mean is ``sum / M``. The mean of the last two global models is
    evaluated, because successive ones swing; clients train from the newest.

    State: the global model and the parameters of the one before. Wire: FedAvg's.
    Deviations: the authors' code (Divyansh03/FedExP) adds M epsilon to ||d||^2; its epsilon shrinks with the square of
    the learning rate's decay. Norms and steps are of parameters; statistics of batch normalisation are averaged.
    """

    def step(self, state: FedExPState, round: Round, uploads: list[Upload], sent: Arrays) -> dict[str, float]:
        names = state.parameters
        each = [squared_distance(upload.arrays, sent, names) for upload in uploads]
        size = squared_distance(state.model, sent, names) + self.params.epsilon
        step = max(1.0, float(np.average(each, weights=self.weights(uploads))) / (2 * size)) if size > 0 else 1.0
        step = min(step, self.params.most or step)
        move(state.model, sent, step, names)
        if state.moved:  # the initial model is no result of a round
            state.before = {name: sent[name] for name in names}
        state.moved = True
        return {"server_step": step}

    def global_model(self, state: FedExPState) -> Arrays:
        before = state.before if self.params.last_two else {}
        return state.model | {n: np.asarray((state.model[n] + old) / 2, old.dtype) for n, old in before.items()}
