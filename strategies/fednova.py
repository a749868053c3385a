"""FedNova: each client's update counts by its direction, not by the number of its steps."""

import numpy as np
from pydantic import Field

from fedcross.strategies.method import Arrays, Round, Settings, Task, Upload
from fedcross.strategies.objective import Objective, Outcome, Prepared, Trained, Visit
from fedcross.strategies.parts.averaging import effective_steps
from fedcross.strategies.parts.single_model import ModelState, SingleModel, to_all


class FedNovaParams(Settings):
    momentum: float = Field(0.0, ge=0, lt=1)


class Counted(Objective[FedNovaParams]):
    assumes_sgd = True
    sends = frozenset({"steps"})

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        return Outcome({"steps": {"tau": np.array(trained.steps, np.int64)}})


class FedNova(SingleModel[FedNovaParams]):
    """Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, NeurIPS 2020.

    With ``d_u = (w - w_u)/a_u`` the server sets ``w -= (sum_u p_u a_u) sum_u p_u d_u``, p_u the share of u's examples
    among the uploads. a_u is the number of plain steps that u's tau_u steps with momentum rho are worth,
    ``(tau - rho (1 - rho^tau)/(1 - rho))/(1 - rho)``. With equal a_u this is FedAvg, and computed as FedAvg.

    State: the global model. Wire: one model down; one model and 8 bytes up, the number of steps.
    Deviations: the authors' code (JYWa/FedNova) accumulates a_u step by step, to the same numbers; its proximal term,
    Nesterov and server momentum are not here. Statistics of batch normalisation are averaged by examples. Uploads that
    report fewer than one step or more than ten million are left out. Weight decay is part of d_u.
    """

    Objective = Counted

    def dispatch(self, state: ModelState, round: Round) -> list[Task]:
        return to_all(state.model, round, returns={"steps": {"tau": ((), "int64")}})

    def aggregate(self, state: ModelState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        return super().aggregate(state, round, [upload for upload in uploads if 1 <= taken(upload) <= 10**7])

    def step(self, state: ModelState, round: Round, uploads: list[Upload], sent: Arrays) -> dict[str, float]:
        worth = np.array([effective_steps(taken(upload), self.params.momentum) for upload in uploads])
        share = np.array(self.weights(uploads)) / sum(self.weights(uploads))
        if (worth == worth[0]).all():
            return {"effective_steps": float(worth[0])}
        weight = share * (share @ worth) / worth
        for name in state.parameters:
            way = np.sum([w * (u.arrays[name] - sent[name]) for w, u in zip(weight, uploads)], axis=0)
            state.model[name] = np.asarray(sent[name] + way, dtype=sent[name].dtype)
        return {"effective_steps": float(share @ worth)}


def taken(upload: Upload) -> int:
    """Return the number of steps that the client reports."""
    return int(upload.extras["steps"]["tau"])
