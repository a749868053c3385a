"""FedSMOO: FedDyn for the weights, and a second dual that makes the clients' ways uphill one."""

from dataclasses import dataclass, field

import numpy as np
from pydantic import Field
from torch import Tensor

from fedcross.strategies.feddyn import Dual, DualParams, DualState, FedDyn
from fedcross.strategies.method import Round, Task, Upload
from fedcross.strategies.objective import Outcome, Prepared, Trained, Visit
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.single_model import to_all
from fedcross.strategies.parts.vectors import keep, kept, named, scaled, vector
from fedcross.strategies.wire.records import Arrays, spec_of


class FedSMOOParams(DualParams):
    rho: float = Field(0.1, ge=0)


class Smooth(Dual):
    batchable = False  # `ascent` changes mu_u in place
    needs = sends = frozenset({"perturbation"})

    def prepare(self, visit: Visit) -> Prepared:
        """Return FedDyn's vectors, m and mu_u, flat (p,); mu_u is zero at a client's first visit."""
        shared = vector(visit.extras["perturbation"], visit.params)
        return {**super().prepare(visit), "shared": shared, "own": kept(visit, "own")}

    def ascent(self, flat: Tensor, gradient: Tensor, prepared: Prepared) -> Tensor | None:
        """Return ``s = rho d/|d|`` with ``d = g - mu_u - m``, and set ``mu_u += s - m``."""
        own, shared = prepared["own"], prepared["shared"]
        way = scaled(gradient - own - shared, self.params.rho)
        own += way - shared
        return way

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        state, own = super().finish(visit, trained, prepared).state or {}, prepared["own"]
        return Outcome({"perturbation": named(own, visit)}, state | keep(visit, own=own))


@dataclass
class FedSMOOState(DualState):
    perturbation: Arrays = field(default_factory=dict)


class FedSMOO(FedDyn[FedSMOOParams, FedSMOOState]):
    """Sun et al., Dynamic Regularized Sharpness Aware Minimization in Federated Learning, ICML 2023.

    In each step client u computes ``s = rho d/|d|`` with ``d = g - mu_u - m``, steps along
    ``g(w + s) + a (w - G + h_u)`` and sets ``mu_u += s - m``; at the end ``h_u += w_u - G``. The server sets
    ``m = rho mean_S mu_u / |mean_S mu_u|`` and ``G = mean_S w_u + mean_N h_u``.

    State: FedDyn's and m; every client keeps h_u and mu_u. Wire: the model and m down, the model and mu_u up.
    Deviations: FedSpeed's. FL-Simulator has the same rule. ``engine=batched`` trains clients one after another.
    """

    Objective = Smooth
    zeros = (*FedDyn.zeros, "perturbation")

    def dispatch(self, state: FedSMOOState, round: Round) -> list[Task]:
        m = state.perturbation
        return to_all(state.model, round, extras={"perturbation": m}, returns={"perturbation": spec_of(m)})

    def step(self, state: FedSMOOState, round: Round, uploads: list[Upload], sent: Arrays) -> None:
        super().step(state, round, uploads, sent)
        mean = weighted_mean([upload.extras["perturbation"] for upload in uploads], [1.0] * len(uploads))
        length = np.sqrt(sum(float(np.sum(np.square(array, dtype=np.float64))) for array in mean.values()))
        share = self.params.rho / (length + 1e-7)  # as in the authors' code
        state.perturbation = {name: np.asarray(a * share, dtype=a.dtype) for name, a in mean.items()}
