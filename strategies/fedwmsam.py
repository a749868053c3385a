"""FedWMSAM: FedCM's momentum with SCAFFOLD's variates, and the gradient where that momentum leads."""

from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedcross.strategies.fedcm import FedCMParams, global_step, weighted
from fedcross.strategies.method import Arrays, Round, Start, Task, Upload
from fedcross.strategies.objective import Batch, Net, Prepared, Tensors, Visit, flatten, unflatten
from fedcross.strategies.parts.vectors import scaled, shifted, vector
from fedcross.strategies.scaffold import Controlled, Scaffold, ScaffoldParams, ScaffoldState

#: The weight of the gradients stays in these bounds, and goes this share of the way to its goal in a round.
BOUNDS, PACE = (0.1, 0.9), 0.01


class FedWMSAMParams(FedCMParams, ScaffoldParams):
    alpha: float = Field(0.1, gt=0, lt=1)
    rho: float = Field(0.01, ge=0)


class MomentumGuided(Controlled):
    needs = frozenset({"control", "momentum", "mixing"})

    def prepare(self, visit: Visit) -> Prepared:
        """Return SCAFFOLD's vectors, a, and ``m_u = D + a/(1 - a) (c - c_u)``, flat (p,)."""
        found, mixing = super().prepare(visit), float(visit.config["mixing"])
        momentum = vector(visit.extras["momentum"], visit.params) / visit.lr
        momentum += mixing / (1 - mixing) * found["correction"]
        return {**found, "momentum": momentum, "mixing": torch.tensor(mixing, dtype=momentum.dtype).to(momentum.device)}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        ahead = prepared["start"] + batch.step * prepared["momentum"] - flatten(params).detach()
        moved = shifted(params, unflatten(scaled(ahead, self.params.rho), params))
        return weighted(super().loss(net, moved, buffers, batch, prepared), prepared["mixing"])

    def gradient(self, flat: Tensor, prepared: Prepared) -> Tensor | None:
        return cast("Tensor", (1 - prepared["mixing"]) * prepared["momentum"])


@dataclass
class FedWMSAMState(ScaffoldState):
    momentum: Arrays = field(default_factory=dict)
    mixing: float = 0.1


class FedWMSAM(Scaffold[FedWMSAMParams, FedWMSAMState]):
    """Li et al., Fast and Flat Federated Learning via Weighted Momentum and Sharpness-Aware Minimization, NeurIPS 2025.

    Step k of client u goes along ``a g(w + e) + (1 - a) m_u`` with ``m_u = D + a/(1 - a) (c - c_u)``, FedCM's D and
    SCAFFOLD's variates, and ``e = rho d/|d|``, ``d = G + k m_u - w``. The server takes the uniform mean and moves a by
    .01 of the way to the mean of ``1 - cos(G_t - w_u, D)`` over the uploads, kept in [.1, .9].

    State: SCAFFOLD's, the last global step, a; every client keeps c_u. Wire: three models down, two up. A client
    computes one gradient a step.
    Deviations: SCAFFOLD's and FedCM's. The authors' code (Huang-Yongzhi/NeurlPS_FedWMSAM) takes ``e`` with the opposite
    sign, and one number of d for each layer, where the paper has the vector.
    """

    Objective = MomentumGuided
    zeros = ("total", "momentum")

    def init(self, start: Start) -> FedWMSAMState:
        state = super().init(start)
        state.mixing = self.params.alpha
        return state

    def dispatch(self, state: FedWMSAMState, round: Round) -> list[Task]:
        extras, config = {"momentum": state.momentum}, {"mixing": state.mixing}
        return [replace(t, extras={**t.extras, **extras}, config=config) for t in super().dispatch(state, round)]

    def step(self, state: FedWMSAMState, round: Round, uploads: list[Upload], sent: Arrays) -> dict[str, float]:
        super().step(state, round, uploads, sent)
        goal = float(np.mean([misaligned(sent, upload.arrays, state.momentum) for upload in uploads]))
        state.mixing += PACE * (float(np.clip(goal, *BOUNDS)) - state.mixing)
        state.momentum = global_step(sent, state.model, uploads, self.params, state.momentum)
        return {"mixing": state.mixing}


def misaligned(before: Arrays, after: Arrays, last: Arrays) -> float:
    """Return ``1 - cos(before - after, last)`` over the entries of `last`; 0 if one of both is zero."""
    move = np.concatenate([np.ravel(before[name] - after[name]) for name in last]).astype(np.float64)
    momentum = np.concatenate([np.ravel(array) for array in last.values()]).astype(np.float64)
    lengths = float(np.linalg.norm(move) * np.linalg.norm(momentum))
    return 1 - float(move @ momentum) / lengths if lengths else 0.0
