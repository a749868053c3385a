"""FedCM: every local step is mixed with the last step of the global model, a momentum that all clients share."""

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from pydantic import Field
from torch import Tensor

from fedcross.strategies.method import Arrays, Round, Settings, Task, Upload
from fedcross.strategies.objective import Batch, Net, Objective, Prepared, Tensors, Visit
from fedcross.strategies.parts.averaging import effective_steps
from fedcross.strategies.parts.single_model import ModelState, SingleModel, to_all
from fedcross.strategies.parts.vectors import vector


class FedCMParams(Settings):
    alpha: float = Field(0.1, gt=0, le=1)
    epochs: int = Field(5, ge=1)
    batch: int = Field(50, ge=1)
    momentum: float = Field(0.0, ge=0, lt=1)

    def privacy_faults(self, clients_per_round: int) -> list[str]:
        """Return why the method does not run with privacy: its server counts steps by numbers of examples."""
        return ["privacy.enabled=true: clients then send 1 as their number of examples, from which this method counts "
                "their steps. Choose fedavg, fedprox or fedcross."]  # fmt: skip


def global_step(before: Arrays, after: Arrays, uploads: list[Upload], params: FedCMParams, names: Arrays) -> Arrays:
    """Return ``(before - after) / steps`` of the parameters `names`; steps is the clients' mean effective number."""
    counts = [params.epochs * -(-upload.num_examples // params.batch) for upload in uploads]
    steps = float(np.mean([effective_steps(count, params.momentum) for count in counts]))
    return {name: np.asarray((before[name] - after[name]) / steps, dtype=before[name].dtype) for name in names}


def weighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """Return `loss` with its value unchanged and its gradient times `weight`."""
    return weight * loss + (1 - weight) * loss.detach()


class ClientMomentum(Objective[Any]):
    assumes_sgd = True
    needs = frozenset({"momentum"})

    def prepare(self, visit: Visit) -> Prepared:
        """Return D, flat (p,): the global model's last step, divided by the learning rate."""
        return {"momentum": vector(visit.extras["momentum"], visit.params) / visit.lr}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        return weighted(super().loss(net, params, buffers, batch, prepared), self.params.alpha)

    def gradient(self, flat: Tensor, prepared: Prepared) -> Tensor | None:
        return cast("Tensor", (1 - self.params.alpha) * prepared["momentum"])


@dataclass
class FedCMState(ModelState):
    momentum: Arrays = field(default_factory=dict)


class FedCM(SingleModel[FedCMParams, FedCMState]):
    """Xu et al., FedCM: Federated Learning with Client-level Momentum, 2021.

    Clients step along ``a g + (1 - a) D`` with ``D = (G_{t-1} - G_t) / (steps lr)``. The server takes the uniform mean.

    State: G and its last step; clients keep none. Wire: two models down, one up.
    Deviations: public code (woodenchild95/FL-Simulator) divides by the last round's learning rate, here by this
    round's. D is divided by the clients' mean number of effective steps
    (:func:`strategies.parts.averaging.effective_steps`). The terms act on parameters; statistics of batch normalisation
    are averaged. The reported loss is the cross-entropy.
    """

    Objective = ClientMomentum
    weighting = "uniform"
    zeros = ("momentum",)

    def dispatch(self, state: FedCMState, round: Round) -> list[Task]:
        return to_all(state.model, round, extras={"momentum": state.momentum})

    def step(self, state: FedCMState, round: Round, uploads: list[Upload], sent: Arrays) -> None:
        state.momentum = global_step(sent, state.model, uploads, self.params, state.momentum)
