"""FedDyn: a linear and a quadratic term make the clients' own optima those of the whole federation."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field
from torch import Tensor
from typing_extensions import TypeVar

from fedcross.strategies.method import Arrays, Round, Settings, Upload
from fedcross.strategies.objective import Objective, Outcome, Prepared, Trained, Visit, flatten
from fedcross.strategies.parts.single_model import ModelState, SingleModel
from fedcross.strategies.parts.vectors import keep, kept


class FedDynParams(Settings):
    alpha: float = Field(0.01, ge=0)
    global_model: Literal["uploads", "server"] = "uploads"
    weighting: Literal["uniform", "examples"] = "uniform"


class DualParams(FedDynParams):
    alpha: float = Field(0.1, ge=0)
    global_model: Literal["uploads", "server"] = "server"


class Dual(Objective[Any]):
    assumes_sgd = True
    keeps = True

    def prepare(self, visit: Visit) -> Prepared:
        """Return the received parameters and h_u, flat (p,); h_u is zero at a client's first visit."""
        return {"start": flatten(visit.params), "dual": kept(visit, "dual")}

    def gradient(self, flat: Tensor, prepared: Prepared) -> Tensor | None:
        alpha = self.params.alpha
        return alpha * (flat - prepared["start"] + prepared["dual"]) if alpha else None

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        return Outcome(state=keep(visit, dual=prepared["dual"] + (trained.flat - prepared["start"])))


@dataclass
class DualState(ModelState):
    """G, N, the mean of the last uploads (empty at first), and the sum of all clients' h_u."""

    mean: Arrays = field(default_factory=dict)
    duals: Arrays = field(default_factory=dict)


D = TypeVar("D", bound=FedDynParams, default=FedDynParams)
S = TypeVar("S", bound=DualState, default=DualState)


class FedDyn(SingleModel[D, S]):
    """Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021.

    Client u minimises ``f_u(w) + a <h_u, w> + (a/2) ||w - G||^2`` and then sets ``h_u += w_u - G``. The server sets
    ``G = mean_S w_u + mean_N h_u``. All h_u start at zero. The paper has ``g_u = -a h_u`` and ``h = -a mean_N h_u``.

    State: G, the last uploads' mean, and the sum of all h_u; every client keeps h_u. Wire: one model down, one up. N is
    the largest number of clients that were ever connected at a draw.
    Deviations: the authors' code (alpemreacar/FedDyn) divides a by a client's share of the examples times N. It
    evaluates the mean of the uploads (``global_model=uploads``), FL-Simulator G. The terms act on parameters;
    statistics of batch normalisation are averaged. A lost client keeps its h_u. The reported training loss is the
    cross-entropy alone. With a defence or privacy the server sums changed updates, the clients' h_u stay as they were.
    """

    Objective = Dual
    zeros: ClassVar[tuple[str, ...]] = ("duals",)

    def step(self, state: S, round: Round, uploads: list[Upload], sent: Arrays) -> None:
        count = max(state.population, len(uploads))
        state.mean, state.model = state.model, dict(state.model)
        for name, old in state.duals.items():
            moves = (upload.arrays[name] - sent[name] for upload in uploads)
            state.duals[name] = np.asarray(np.sum([old, *moves], axis=0), dtype=old.dtype)
            state.model[name] = np.asarray(state.mean[name] + state.duals[name] / count, dtype=old.dtype)

    def global_model(self, state: S) -> Arrays:
        return state.mean or state.model if self.params.global_model == "uploads" else state.model
