"""FedSWA: a learning rate that falls within each visit, and a global step longer than the clients' mean."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field
from typing_extensions import TypeVar

from fedcross.core.settings import Settings
from fedcross.strategies.method import Round, Upload
from fedcross.strategies.objective import Objective
from fedcross.strategies.parts.population import Uniform
from fedcross.strategies.parts.single_model import ModelState

if TYPE_CHECKING:
    from torch import Tensor


class FedSWAParams(Settings):
    """Settings of FedSWA.

    Parameters
    ----------
    ratio : float
        The learning rate falls to this share of itself within a visit, 0 to 1; 1 keeps it.
    server_lr : float
        Length of the global step, in steps to the uploads' mean.
    """

    ratio: float = Field(0.1, ge=0, le=1)
    server_lr: float = Field(1.0, gt=0)


F = TypeVar("F", bound=FedSWAParams, default=FedSWAParams)


class Falling(Objective[F]):
    """Cross-entropy, with a learning rate that falls linearly within a visit."""

    assumes_sgd = True

    def rate(self, number: int, steps: int | Tensor) -> float | Tensor:
        """Return ``1 - (1 - ratio) number / steps``."""
        return 1 - (1 - self.params.ratio) * number / steps


class FedSWA(Uniform[FedSWAParams, ModelState]):
    """Liu et al., Improving Generalization in Federated Learning with Highly Heterogeneous Data, ICML 2025.

    Step k of the T steps of a visit has the learning rate ``lr (1 - (1 - r) k / T)``. The server sets
    ``G += s (mean w_u - G)``, the mean uniform, s its learning rate.

    State: the global model; clients keep none. Wire: one model down, one up.

    Compared with the authors' code (junkangLiu0/FedSWA): it has r = 0 and doubles the learning rate, which is a setting
    of the run here (``train.lr``). The paper has s from 1 to 1.5.

    Deviations: s acts on floating entries; statistics of batch normalisation are among them, as in the authors' code.
    """

    Objective = Falling

    def aggregate(self, state: ModelState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Move the global model towards the uploads' mean, or beyond it."""
        before, rate = state.model, self.params.server_lr
        metrics = super().aggregate(state, round, uploads)
        if uploads and rate != 1:
            moved = {
                name: np.asarray(before[name] + rate * (array - before[name]), dtype=array.dtype)
                for name, array in state.model.items()
                if array.dtype.kind == "f"
            }
            state.model = {**state.model, **moved}
        return metrics
