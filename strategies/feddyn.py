"""FedDyn: a linear and a quadratic term make the clients' own optima those of the whole federation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedcross.core.settings import Settings
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.objective import (
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
from fedcross.strategies.round.federation import State
from fedcross.strategies.round.single_model import SingleModel
from fedcross.strategies.wire.protocol import Round, Upload
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


class FedDyn(SingleModel[FedDynParams]):
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

    With ``defence.enabled`` long updates are shortened, and only those of a million medians are quarantined: a client
    whose g_u does not fit sends long ones until g_u does, which it never would if they were lost.

    Deviations: the terms act on parameters; statistics of batch normalisation are averaged. If a client's upload is
    lost, its g_u and h stay as they were. A client that loses its disk starts again at g_u = 0, and its old share stays
    in h. The reported training loss is the cross-entropy alone.
    """

    Objective = Dynamic
    unusual = 1e6

    def setup(self, arrays: Arrays) -> None:
        """Keep the initial model; no client has drifted yet."""
        super().setup(arrays)
        self.mean = self.model
        self.drift: Arrays = {name: np.zeros_like(arrays[name]) for name in self.parameter_names}
        self.population = 0

    def sample(self, number: int, available: Sequence[int]) -> tuple[int, ...]:
        """Draw as every method does, and store the largest number of connected clients so far."""
        self.population = max(self.population, len(available))
        return super().sample(number, available)

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Add the uploads' drifts to the sum, and move their mean by the sum's share of one client."""
        if not uploads:
            return {}
        self.mean = weighted_mean([upload.arrays for upload in uploads], [1.0] * len(uploads))
        self.drift = {
            name: np.asarray(
                np.sum([total, *(u.arrays[name] - self.model[name] for u in uploads)], axis=0), dtype=total.dtype
            )
            for name, total in self.drift.items()
        }
        count = max(self.population, len(uploads))
        moved = {
            name: np.asarray(self.mean[name] + total / count, dtype=total.dtype) for name, total in self.drift.items()
        }
        self.model = {**self.mean, **moved}
        return {}

    def global_model(self) -> Arrays:
        """Return the mean of the last uploads or, if so configured, the model that clients start from."""
        return self.mean if self.params.global_model == "uploads" else self.model

    def state(self) -> State:
        """Return both models, the sum of drifts and the number of clients."""
        state = super().state()
        state.arrays |= {f"mean.{name}": array for name, array in self.mean.items()}
        state.arrays |= {f"drift.{name}": array for name, array in self.drift.items()}
        state.values["population"] = self.population
        return state

    def restore(self, state: State) -> None:
        """Load what :meth:`state` returned."""
        super().restore(state)
        self.mean = {name: state.arrays[f"mean.{name}"] for name in self.spec}
        self.drift = {name: state.arrays[f"drift.{name}"] for name in self.parameter_names}
        self.population = int(state.values["population"])
