"""FedMoSWA: FedSWA with SCAFFOLD's control variates, the server's one a moving average."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from fedcross.strategies.method import Round, Upload
from fedcross.strategies.objective import Outcome, Prepared, Trained, Visit
from fedcross.strategies.scaffold import Controlled, Scaffold, ScaffoldParams, ScaffoldState

if TYPE_CHECKING:
    from torch import Tensor


class FedMoSWAParams(ScaffoldParams):
    """Settings of FedMoSWA, beside those of SCAFFOLD.

    Parameters
    ----------
    ratio : float
        The learning rate falls to this share of itself within a visit, 0 to 1; 1 keeps it.
    beta : float
        Share of the way to the participants' mean variate that the server's variate goes in a round.
    """

    ratio: float = Field(0.1, ge=0, le=1)
    beta: float = Field(0.4, ge=0, le=1)


class FallingControlled(Controlled):
    """Cross-entropy corrected by ``c - c_u``, with a learning rate that falls linearly within a visit."""

    params: FedMoSWAParams

    def rate(self, number: int, steps: int | Tensor) -> float | Tensor:
        """Return ``1 - (1 - ratio) number / steps``."""
        return 1 - (1 - self.params.ratio) * number / steps

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        """Keep ``c_u+ = c_u - c + (G - w) / (sum of rates)`` and send ``c_u+ - c``."""
        mean = 1 - (1 - self.params.ratio) * (trained.steps - 1) / (2 * trained.steps)
        kept = super().finish(replace(visit, lr=visit.lr * mean), trained, prepared).state or {}
        control = visit.extras["control"]
        return Outcome({"control": {name: np.subtract(kept[name], control[name]) for name in control}}, kept)


class FedMoSWA(Scaffold):
    """Liu et al., Improving Generalization in Federated Learning with Highly Heterogeneous Data, ICML 2025.

    Clients step along ``g - c_u + c`` at FedSWA's falling learning rate and set
    ``c_u+ = c_u - c + (G - w_u) / (sum of the steps' rates)``. The server sets ``c += b mean_S (c_u+ - c)`` and
    ``G += server_lr (mean w_u - G)``. All variates start at zero.

    State: G and N c; every client keeps c_u. Wire: the model and c down, the model and ``c_u+ - c`` up.

    Compared with the authors' code (junkangLiu0/FedSWA): it has r = 0 and b = .4, divides by the mean of the first and
    the last rate, and takes c at its first round whole.

    Deviations: as :class:`strategies.scaffold.Scaffold`.
    """

    Params = FedMoSWAParams
    Objective = FallingControlled
    params: FedMoSWAParams

    def aggregate(self, state: ScaffoldState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Aggregate as SCAFFOLD does, with the variates' changes weighted so that c goes the share b of the way."""
        weight = self.params.beta * max(state.population, 1) / max(len(uploads), 1)
        changed = []
        for upload in uploads:
            control = {name: weight * array for name, array in upload.extras["control"].items()}
            changed.append(replace(upload, extras={"control": control}))
        return super().aggregate(state, round, changed)
