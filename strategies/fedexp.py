"""FedExP: the server extrapolates the mean update by as much as the clients' updates disagree."""

from __future__ import annotations

from typing import Literal

import numpy as np
from pydantic import Field

from fedcross.core.settings import Settings
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.round.federation import State
from fedcross.strategies.round.single_model import SingleModel
from fedcross.strategies.wire.protocol import Round, Upload
from fedcross.strategies.wire.records import Arrays


class FedExPParams(Settings):
    """Settings of FedExP.

    Parameters
    ----------
    epsilon : float
        Added to the squared norm of the mean update, 0 or more.
    weighting : {"examples", "uniform"}
        Weight of an upload in both means: the authors' code, or the paper.
    most : float, optional
        Largest server step; null: no limit, 1: FedAvg.
    last_two : bool
        Evaluate the mean of the last two global models, as published, or the newest one.
    """

    epsilon: float = Field(1e-3, ge=0)
    weighting: Literal["examples", "uniform"] = "examples"
    most: float | None = Field(None, ge=1)
    last_two: bool = True


class FedExP(SingleModel[FedExPParams]):
    """Jhunjhunwala, Wang and Joshi, FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023.

    With the updates ``d_u = w_u - w`` and their mean d the server sets ``w += eta_g d``,
    ``eta_g = max(1, mean ||d_u||^2 / (2 (||d||^2 + epsilon)))``, which is the paper's
    ``sum ||d_u||^2 / (2 M (||d||^2 + epsilon))`` for M uploads of equal weight. Clients train as in FedAvg. The mean of
    the last two global models is evaluated, for successive ones swing from side to side; clients start from the newest.

    State: the global model and the parameters of the one before; clients keep none. Wire: one model down, one up.

    Compared with the authors' code (Divyansh03/FedExP): it adds M epsilon to ||d||^2, this and the paper epsilon; its
    epsilon (.001 for CIFAR-10 and -100, .1 for EMNIST) shrinks with the square of the learning rate's decay, here it
    stays. Its learning rate falls by .998 a round, gradients are clipped to norm 10 and weights decay by .0001, which
    are settings of the run here (``train.lr_decay``, ``train.clip``, ``train.weight_decay``).

    Deviations: norms and steps are of parameters. Statistics of batch normalisation are averaged, and the newest ones
    evaluated; the authors' code leaves them as they were at first. If an upload is lost, the means are over the others.
    """

    def setup(self, arrays: Arrays) -> None:
        """Keep the initial model; there is none before it."""
        super().setup(arrays)
        self.before: Arrays = {}
        self._moved = False

    def weights(self, uploads: list[Upload]) -> list[float]:
        """Return n_k, or 1 for uniform means."""
        return super().weights(uploads) if self.params.weighting == "examples" else [1.0] * len(uploads)

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Average the uploads and extrapolate."""
        if not uploads:
            return {}
        weights = self.weights(uploads)
        mean = weighted_mean([upload.arrays for upload in uploads], weights)
        each = [self._square(upload.arrays) for upload in uploads]
        size = self._square(mean) + self.params.epsilon
        step = max(1.0, float(np.average(each, weights=weights)) / (2 * size)) if size > 0 else 1.0
        step = min(step, self.params.most) if self.params.most is not None else step
        if self._moved:  # the initial model is no result of a round
            self.before = {name: self.model[name] for name in self.parameter_names}
        self._moved = True
        if step > 1:
            for name in self.parameter_names:
                start = self.model[name]
                mean[name] = np.asarray(start + step * (mean[name] - start), dtype=start.dtype)
        self.model = mean
        return {"server_step": step}

    def _square(self, arrays: Arrays) -> float:
        """Return the squared norm of the update from the global model to `arrays`, in float64."""
        updates = (np.subtract(arrays[name], self.model[name], dtype=np.float64) for name in self.parameter_names)
        return float(sum(np.vdot(update, update) for update in updates))

    def global_model(self) -> Arrays:
        """Return the mean of the last two global models, or the newest one."""
        if not (self.params.last_two and self.before):
            return self.model
        middle = {name: np.asarray((self.model[name] + old) / 2, old.dtype) for name, old in self.before.items()}
        return {**self.model, **middle}

    def state(self) -> State:
        """Return the global model and the parameters of the one before."""
        state = super().state()
        state.arrays |= {f"before.{name}": array for name, array in self.before.items()}
        state.values["moved"] = self._moved
        return state

    def restore(self, state: State) -> None:
        """Load what :meth:`state` returned."""
        super().restore(state)
        self._moved = bool(state.values["moved"])
        names = [name for name in self.parameter_names if f"before.{name}" in state.arrays]
        self.before = {name: state.arrays[f"before.{name}"] for name in names}
