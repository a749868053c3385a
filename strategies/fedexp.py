"""FedExP: the server extrapolates the mean update by as much as the clients' updates disagree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from pydantic import Field

from fedcross.core.settings import Settings
from fedcross.strategies.method import Round, Upload
from fedcross.strategies.parts.averaging import move, weighted_mean
from fedcross.strategies.parts.single_model import ModelState, SingleModel
from fedcross.strategies.wire.records import Arrays


class FedExPParams(Settings):
    """Settings, explained in ``conf/method/fedexp.yaml``."""

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

    With the updates ``d_u = w_u - w`` and their mean d the server sets ``w += eta_g d``,
    ``eta_g = max(1, mean ||d_u||^2 / (2 (||d||^2 + epsilon)))``; the paper's mean is ``sum / M``. Clients train as in
    FedAvg, from the newest model. The mean of the last two global models is evaluated, because successive ones swing.

    State: the global model and the parameters of the one before; clients keep none. Wire: one model down, one up.

    Deviations: the authors' code (Divyansh03/FedExP) adds M epsilon to ||d||^2; its epsilon (.001 for CIFAR-10 and
    -100, .1 for EMNIST) shrinks with the square of the learning rate's decay, here it stays. Its decay of .998 a round,
    clipping to 10 and weight decay of .0001 are ``train.lr_decay``, ``train.clip`` and ``train.weight_decay``. Norms
    and steps are of parameters; statistics of batch normalisation are averaged, the code leaves them as at first. If an
    upload is lost, the means are over the others.
    """

    State = FedExPState

    def aggregate(self, state: FedExPState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Average the uploads and extrapolate."""
        if not uploads:
            return {}
        weights = self.weights(uploads)
        mean = weighted_mean([upload.arrays for upload in uploads], weights)
        each = [_square(state, upload.arrays) for upload in uploads]
        size = _square(state, mean) + self.params.epsilon
        step = max(1.0, float(np.average(each, weights=weights)) / (2 * size)) if size > 0 else 1.0
        step = min(step, self.params.most) if self.params.most is not None else step
        if state.moved:  # the initial model is no result of a round
            state.before = {name: state.model[name] for name in state.parameters}
        state.moved = True
        move(mean, state.model, step, state.parameters)
        state.model = mean
        return {"server_step": step}

    def global_model(self, state: FedExPState) -> Arrays:
        """Return the mean of the last two global models, or the newest one."""
        if not (self.params.last_two and state.before):
            return state.model
        middle = {name: np.asarray((state.model[name] + old) / 2, old.dtype) for name, old in state.before.items()}
        return {**state.model, **middle}


def _square(state: FedExPState, arrays: Arrays) -> float:
    """Return the squared norm of the update from the global model to `arrays`, in float64."""
    updates = (np.subtract(arrays[name], state.model[name], dtype=np.float64) for name in state.parameters)
    return float(sum(np.vdot(update, update) for update in updates))
