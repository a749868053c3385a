"""FedCM: every local step is mixed with the last step of the global model, a momentum that all clients share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from pydantic import Field
from torch import Tensor
from typing_extensions import TypeVar

from fedcross.core.settings import Settings
from fedcross.strategies.method import Round, Start, Task, Upload
from fedcross.strategies.objective import Batch, Net, Objective, Prepared, Tensors, Visit
from fedcross.strategies.parts.averaging import effective_steps
from fedcross.strategies.parts.population import Uniform
from fedcross.strategies.parts.single_model import ModelState
from fedcross.strategies.parts.vectors import vector, zeros
from fedcross.strategies.wire.records import Arrays


class FedCMParams(Settings):
    """Settings of FedCM.

    Parameters
    ----------
    alpha : float
        Weight of the batch's gradient, 0 to 1; the momentum has the rest. 1 is FedAvg with a uniform mean.
    epochs, batch, momentum : int, int, float
        Those of the clients' training, from which the server counts their effective steps.
    """

    alpha: float = Field(0.1, gt=0, le=1)
    epochs: int = Field(5, ge=1)
    batch: int = Field(50, ge=1)
    momentum: float = Field(0.0, ge=0, lt=1)

    def privacy_faults(self, clients_per_round: int) -> list[str]:
        """Return why the method does not run with privacy: its server counts steps by numbers of examples."""
        return ["privacy.enabled=true: clients then send 1 as their number of examples, from which this method counts "
                "their steps. Choose fedavg, fedprox or fedcross."]  # fmt: skip


C = TypeVar("C", bound=FedCMParams, default=FedCMParams)


def global_step(before: Arrays, after: Arrays, uploads: list[Upload], params: FedCMParams, names: Arrays) -> Arrays:
    """Return ``(before - after) / steps`` of the parameters `names`; steps is the clients' mean effective number."""
    counts = [params.epochs * -(-upload.num_examples // params.batch) for upload in uploads]
    steps = float(np.mean([effective_steps(count, params.momentum) for count in counts]))
    return {name: np.asarray((before[name] - after[name]) / steps, dtype=before[name].dtype) for name in names}


class ClientMomentum(Objective[C]):
    """Cross-entropy, whose gradient g is mixed with the momentum D: ``a g + (1 - a) D``."""

    assumes_sgd = True
    needs = frozenset({"momentum"})

    def prepare(self, visit: Visit) -> Prepared:
        """Return D, flat (p,): the global model's last step, divided by the learning rate."""
        return {"momentum": vector(visit.extras["momentum"], visit.params) / visit.lr}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        """Return the cross-entropy of one batch; its gradient is a times that of cross-entropy."""
        return weighted(super().loss(net, params, buffers, batch, prepared), self.params.alpha)

    def gradient(self, flat: Tensor, prepared: Prepared) -> Tensor | None:
        """Return ``(1 - a) D``."""
        term: Tensor = (1 - self.params.alpha) * prepared["momentum"]
        return term


def weighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """Return `loss` with its value unchanged and its gradient times `weight`."""
    return weight * loss + (1 - weight) * loss.detach()


@dataclass
class FedCMState(ModelState):
    """The global model, and its last step, divided by the clients' mean number of steps."""

    momentum: Arrays = field(default_factory=dict)


class FedCM(Uniform[C, FedCMState]):
    """Xu et al., FedCM: Federated Learning with Client-level Momentum, 2021.

    Clients step along ``a g + (1 - a) D`` with ``D = (G_{t-1} - G_t) / (steps lr)``. The server takes the uniform mean.

    State: G and its last step; clients keep none. Wire: two models down, one up.

    Compared with public code (woodenchild95/FL-Simulator): the same rule; it divides by the last round's learning rate,
    here by this round's. Its clients have no momentum of their own (``train.momentum=0``).

    Deviations: clients may take different numbers of steps; D is divided by the mean of the effective ones
    (:func:`strategies.parts.averaging.effective_steps`). The terms act on parameters; statistics of
    batch normalisation are averaged. The reported training loss is the cross-entropy.
    """

    Objective = ClientMomentum

    def init(self, start: Start) -> FedCMState:
        """Keep the initial model; it has made no step."""
        return FedCMState(super().init(start).model, zeros(start))

    def dispatch(self, state: FedCMState, round: Round) -> list[Task]:
        """Send the global model and its last step."""
        return [replace(task, extras={"momentum": state.momentum}) for task in super().dispatch(state, round)]

    def aggregate(self, state: FedCMState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Replace the global model by the mean of the uploads, and keep its step."""
        before, metrics = state.model, super().aggregate(state, round, uploads)
        if uploads:
            state.momentum = global_step(before, state.model, uploads, self.params, state.momentum)
        return metrics
