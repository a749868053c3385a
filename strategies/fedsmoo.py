"""FedSMOO: FedDyn for the weights, and a second dual that makes the clients' ways uphill one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedcross.strategies.method import Round, Start, Task, Upload
from fedcross.strategies.objective import Outcome, Prepared, Trained, Visit, as_arrays, unflatten
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.duals import Dual, DualParams, DualServer, DualState
from fedcross.strategies.parts.vectors import keep, kept, scaled, vector, zeros
from fedcross.strategies.wire.records import Arrays, spec_of

#: Added to the norm of the mean perturbation, as in the authors' code.
TINY = 1e-7


class FedSMOOParams(DualParams):
    """Settings of FedSMOO, beside those of FedDyn: ``rho``, the length of the way uphill; 0 is FedDyn."""

    rho: float = Field(0.1, ge=0)


class Smooth(Dual[FedSMOOParams]):
    """FedDyn's loss, with the gradient of cross-entropy taken at ``w + s``; mu_u changes in every step."""

    batchable = False  # `ascent` changes mu_u in place
    needs = sends = frozenset({"perturbation"})

    def prepare(self, visit: Visit) -> Prepared:
        """Return FedDyn's vectors, m and mu_u, flat (p,); mu_u is zero at a client's first visit."""
        found = super().prepare(visit)
        shared = vector(visit.extras["perturbation"], visit.params)
        return {**found, "shared": shared, "own": kept(visit, "own", torch.zeros_like(shared))}

    def ascent(self, flat: Tensor, gradient: Tensor, prepared: Prepared) -> Tensor | None:
        """Return ``s = rho d/|d|`` with ``d = g - mu_u - m``, and set ``mu_u += s - m``."""
        own, shared = prepared["own"], prepared["shared"]
        way = scaled(gradient - own - shared, self.params.rho)
        own += way - shared
        return way

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        """Keep h_u and mu_u, and send mu_u."""
        state = super().finish(visit, trained, prepared).state or {}
        own = prepared["own"]
        return Outcome({"perturbation": as_arrays(unflatten(own, visit.params))}, {**state, **keep(visit, own=own)})


@dataclass
class FedSMOOState(DualState):
    """That of FedDyn, and m, the perturbation of the whole federation."""

    perturbation: Arrays = field(default_factory=dict)


class FedSMOO(DualServer[FedSMOOParams, FedSMOOState]):
    """Sun et al., Dynamic Regularized Sharpness Aware Minimization in Federated Learning, ICML 2023.

    In each step client u computes ``s = rho d/|d|`` with ``d = g - mu_u - m``, steps along
    ``g(w + s) + a (w - G + h_u)`` and sets ``mu_u += s - m``; at the end ``h_u += w_u - G``. The server sets
    ``m = rho mean_S mu_u / |mean_S mu_u|`` and ``G = mean_S w_u + mean_N h_u``.

    State: FedDyn's and m; every client keeps h_u and mu_u. Wire: the model and m down, the model and mu_u up. A client
    computes two gradients a step.

    Compared with public code: FL-Simulator has the same rule; FL-SAM leaves the last s out of the mean of mu_u.

    Deviations: as :class:`strategies.fedspeed.FedSpeed`. ``engine=batched`` trains clients one after another.
    """

    Objective = Smooth

    def init(self, start: Start) -> FedSMOOState:
        """Keep the initial model; m is zero."""
        return FedSMOOState(**vars(super().init(start)), perturbation=zeros(start))

    def dispatch(self, state: FedSMOOState, round: Round) -> list[Task]:
        """Send the global model and m; expect mu_u."""
        extras, returns = {"perturbation": state.perturbation}, {"perturbation": spec_of(state.perturbation)}
        return [replace(task, extras=extras, returns=returns) for task in super().dispatch(state, round)]

    def aggregate(self, state: FedSMOOState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Aggregate as FedDyn does, and set m to the uploads' mean perturbation, rho long."""
        if uploads:
            mean = weighted_mean([upload.extras["perturbation"] for upload in uploads], [1.0] * len(uploads))
            length = np.sqrt(sum(float(np.sum(np.square(array, dtype=np.float64))) for array in mean.values()))
            share = self.params.rho / (length + TINY)
            state.perturbation = {name: np.asarray(a * share, dtype=a.dtype) for name, a in mean.items()}
        return super().aggregate(state, round, uploads)
