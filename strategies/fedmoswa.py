"""FedMoSWA: FedSWA with SCAFFOLD's control variates, the server's one a moving average."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from pydantic import Field

from fedcross.strategies.fedswa import Falling
from fedcross.strategies.method import Round, Upload
from fedcross.strategies.objective import Outcome, Prepared, Trained, Visit
from fedcross.strategies.scaffold import Controlled, Scaffold, ScaffoldParams, ScaffoldState


class FedMoSWAParams(ScaffoldParams):
    ratio: float = Field(0.1, ge=0, le=1)
    beta: float = Field(0.4, ge=0, le=1)


class FallingControlled(Falling, Controlled):
    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        """Keep ``c_u+ = c_u - c + (G - w) / (sum of rates)`` and send ``c_u+ - c``."""
        mean = 1 - (1 - self.params.ratio) * (trained.steps - 1) / (2 * trained.steps)
        kept = super().finish(replace(visit, lr=visit.lr * mean), trained, prepared).state or {}
        control = visit.extras["control"]
        return Outcome({"control": {name: np.subtract(kept[name], control[name]) for name in control}}, kept)


class FedMoSWA(Scaffold[FedMoSWAParams]):
    """Liu et al., Improving Generalization in Federated Learning with Highly Heterogeneous Data, ICML 2025.

    Clients step along ``g - c_u + c`` at FedSWA's falling learning rate and set
    ``c_u+ = c_u - c + (G - w_u) / (sum of the steps' rates)``. The server sets ``c += b mean_S (c_u+ - c)`` and
    ``G += server_lr (mean w_u - G)``. All variates start at zero.

    State: G and N c; every client keeps c_u. Wire: the model and c down, the model and ``c_u+ - c`` up.
    Deviations: SCAFFOLD's. The authors' code (junkangLiu0/FedSWA) has r = 0 and b = .4, divides by the mean of the
    first and the last rate, and takes c at its first round whole.
    """

    Objective = FallingControlled

    def sample(self, state: ScaffoldState, round: Round, available: Sequence[int]) -> tuple[int, ...]:
        """Draw; where N grows, keep the average c."""
        before = state.population
        drawn = super().sample(state, round, available)
        if 0 < before < state.population:
            factor = state.population / before
            state.total = {name: np.multiply(array, factor, dtype=array.dtype) for name, array in state.total.items()}
        return drawn

    def aggregate(self, state: ScaffoldState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        weight = self.params.beta * max(state.population, 1) / max(len(uploads), 1)
        changed = []
        for upload in uploads:
            control = {name: weight * array for name, array in upload.extras["control"].items()}
            changed.append(replace(upload, extras={"control": control}))
        return super().aggregate(state, round, changed)
