"""FedDyn's two halves, which FedSpeed, FedSMOO, FedLESAM-D and FedGMT share.

The dual vector of client u is the sum of its moves so far, ``h_u = sum_t (w_u - G_t)``. The client keeps it and the
server sums it up from the uploads, so only models travel. The papers' ``g_u`` is ``-alpha h_u``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, cast

import numpy as np
from pydantic import Field
from torch import Tensor
from typing_extensions import TypeVar

from fedcross.core.settings import Settings
from fedcross.strategies.method import Round, Start, Upload
from fedcross.strategies.objective import Objective, Outcome, Prepared, Trained, Visit, flatten
from fedcross.strategies.parts.population import Population, PopulationState
from fedcross.strategies.parts.vectors import keep, kept, zeros
from fedcross.strategies.wire.records import Arrays


class DualParams(Settings):
    """Settings of FedDyn's two halves.

    Parameters
    ----------
    alpha : float
        Weight of the client's term; with 0 clients minimise the loss alone. What the server adds has no factor alpha.
    global_model : {"uploads", "server"}
        The model to evaluate: the mean of the last uploads, or the one that clients start from.
    weighting : {"uniform", "examples"}
        Of the uploads in their mean; the mean of the h_u is uniform.
    """

    alpha: float = Field(0.1, ge=0)
    global_model: Literal["uploads", "server"] = "server"
    weighting: Literal["uniform", "examples"] = "uniform"


D = TypeVar("D", bound=DualParams, default=DualParams)


class Dual(Objective[D]):
    """Cross-entropy + alpha <h_u, w> + (alpha/2) ||w - G||^2, both terms through their gradient."""

    assumes_sgd = True
    keeps = True

    def prepare(self, visit: Visit) -> Prepared:
        """Return the received parameters and h_u, flat (p,); h_u is zero at a client's first visit."""
        start = flatten(visit.params)
        return {"start": start, "dual": kept(visit, "dual")}

    def gradient(self, flat: Tensor, prepared: Prepared) -> Tensor | None:
        """Return ``alpha (w - G + h_u)``."""
        alpha = self.params.alpha
        return alpha * (flat - prepared["start"] + prepared["dual"]) if alpha else None

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        """Keep ``h_u + w_u - G``."""
        return Outcome(state=keep(visit, dual=prepared["dual"] + (trained.flat - prepared["start"])))


@dataclass
class DualState(PopulationState):
    """G, N, the mean of the last uploads, and the sum of all clients' h_u."""

    mean: Arrays = field(default_factory=dict)
    duals: Arrays = field(default_factory=dict)


S = TypeVar("S", bound=DualState, default=DualState)


class DualServer(Population[D, S]):
    """The server's half: ``G = mean_S w_u + mean_N h_u`` with means over the uploads S and all N clients."""

    Objective = Dual

    def init(self, start: Start) -> S:
        """Keep the initial model; no client has moved yet."""
        model = super().init(start).model
        return cast("S", DualState(model, mean=model, duals=zeros(start)))

    def aggregate(self, state: S, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Add the uploads' moves to the sum, and put the sum's share of one client on top of their mean."""
        if not uploads:
            return {}
        sent, count = state.model, max(state.population, len(uploads))
        super().aggregate(state, round, uploads)
        state.mean, state.model = state.model, dict(state.model)
        for name, old in state.duals.items():
            moves = (upload.arrays[name] - sent[name] for upload in uploads)
            state.duals[name] = np.asarray(np.sum([old, *moves], axis=0), dtype=old.dtype)
            state.model[name] = np.asarray(state.mean[name] + state.duals[name] / count, dtype=old.dtype)
        return {}

    def global_model(self, state: S) -> Arrays:
        """Return the mean of the last uploads or, if so configured, the model that clients start from."""
        return state.mean if self.params.global_model == "uploads" else state.model
