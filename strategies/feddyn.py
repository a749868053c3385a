"""FedDyn: a linear and a quadratic term make the clients' own optima those of the whole federation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedcross.core.settings import Settings
from fedcross.strategies.method import Round, Start, Upload
from fedcross.strategies.objective import (
    Objective,
    Outcome,
    Prepared,
    Trained,
    Visit,
    as_arrays,
    as_tensors,
    flatten,
    unflatten,
)
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.single_model import ModelState, SingleModel
from fedcross.strategies.wire.records import Arrays


class FedDynParams(Settings):
    """Settings of FedDyn.

    Parameters
    ----------
    alpha : float
        a: weight of the quadratic term, above 0. FedAvg is no limit of it: what the server adds to the mean of the
        uploads does not become small with a.
    global_model : {"uploads", "server"}
        The model to evaluate: the mean of the last uploads (the authors' code) or the one that clients start from.
    """

    alpha: float = Field(0.01, gt=0)
    global_model: Literal["uploads", "server"] = "uploads"


class Dynamic(Objective[FedDynParams]):
    """Cross-entropy - <g_u, w> + (a/2) ||w - w_t||^2, both terms through their gradient."""

    assumes_sgd = True
    keeps = True

    def prepare(self, visit: Visit) -> Prepared:
        """Return the received parameters and g_u, flat (p,); g_u is zero at a client's first visit."""
        start = flatten(visit.params)
        if not visit.state:
            return {"start": start, "own": torch.zeros_like(start)}
        kept = as_tensors(visit.state, like=start)
        return {"start": start, "own": flatten({name: kept[name] for name in visit.params})}

    def gradient(self, flat: Tensor, prepared: Prepared) -> Tensor | None:
        """Return ``a (w - w_t) - g_u``."""
        term: Tensor = self.params.alpha * (flat - prepared["start"]) - prepared["own"]
        return term

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        """Keep ``g_u - a (w_u - w_t)``."""
        new = prepared["own"] - self.params.alpha * (trained.flat.detach() - prepared["start"])
        return Outcome(state=as_arrays(unflatten(new, visit.params)))


@dataclass
class FedDynState(ModelState):
    """w, the last uploads' mean, the sum of all drifts ``-N h/a``, and N."""

    mean: Arrays
    drift: Arrays
    population: int = 0


class FedDyn(SingleModel[FedDynParams, FedDynState]):
    """Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021.

    Client u minimises ``f_u(w) - <g_u, w> + (a/2) ||w - w_t||^2`` and then sets ``g_u -= a (w_u - w_t)``. The server
    sets ``h -= (a/N) sum_u (w_u - w_t)`` over the uploads and ``w = mean w_u - h/a``, the mean uniform. g_u and h start
    at zero.

    State: w, the last uploads' mean, and ``-N h/a``, the sum of all drifts so far; every client keeps g_u (the
    parameters, on its disk). Wire: one model down, one up. N is the largest number of clients that were ever connected
    at a draw.

    Compared with the authors' code (alpemreacar/FedDyn): it keeps ``-g_u/a`` and ``-h/a``, which is the same; it
    divides a by a client's share of the examples times N, here all clients have one a; it trains without momentum, with
    weight decay .001 and gradients clipped to norm 10 (``train.clip=10``), which are settings of the run here. It
    evaluates the mean of the uploads, as ``global_model=uploads`` does.

    Deviations: the terms act on parameters; statistics of batch normalisation are averaged. If a client's upload is
    lost, its g_u and h stay as they were. A client that loses its disk starts again at g_u = 0, and its old share stays
    in h. The reported training loss is the cross-entropy alone.
    """

    Objective = Dynamic

    def init(self, start: Start) -> FedDynState:
        """Keep the initial model; no client has drifted yet."""
        model = super().init(start).model
        return FedDynState(model, model, {name: np.zeros_like(start.arrays[name]) for name in start.parameters})

    def sample(self, state: FedDynState, round: Round, available: Sequence[int]) -> tuple[int, ...]:
        """Draw as every method does, and store the largest number of connected clients so far."""
        state.population = max(state.population, len(available))
        return super().sample(state, round, available)

    def aggregate(self, state: FedDynState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Add the uploads' drifts to the sum, and move their mean by the sum's share of one client."""
        if not uploads:
            return {}
        state.mean = weighted_mean([upload.arrays for upload in uploads], [1.0] * len(uploads))
        count, moved = max(state.population, len(uploads)), {}
        for name, total in state.drift.items():
            drifts = (upload.arrays[name] - state.model[name] for upload in uploads)
            new = np.asarray(np.sum([total, *drifts], axis=0), dtype=total.dtype)
            moved[name] = np.asarray(state.mean[name] + new / count, dtype=total.dtype)
            state.drift[name] = new
        state.model = {**state.mean, **moved}
        return {}

    def global_model(self, state: FedDynState) -> Arrays:
        """Return the mean of the last uploads or, if so configured, the model that clients start from."""
        return state.mean if self.params.global_model == "uploads" else state.model
