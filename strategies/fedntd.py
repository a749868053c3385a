"""FedNTD: FedAvg with distillation from the global model over the labels that are not an example's true one."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedcross.core.settings import Settings
from fedcross.strategies.objective import Batch, Net, Objective, Prepared, Tensors, Visit
from fedcross.strategies.parts.losses import cross_entropy
from fedcross.strategies.parts.single_model import SingleModel


def other_labels(classes: int, device: torch.device) -> Tensor:
    """Return for each label all others in order, int64, shape (classes, classes - 1)."""
    columns = torch.arange(classes - 1, device=device)[None, :]
    return columns + (columns >= torch.arange(classes, device=device)[:, None])


def not_true(scores: Tensor, teacher: Tensor, others: Tensor, tau: float) -> Tensor:
    """Return ``KL(teacher || student)`` at temperature `tau` over the columns `others`, per example, shape (batch,).

    `scores` and `teacher` have shape (batch, classes), `others` (batch, classes - 1).
    """
    student, target = (functional.log_softmax(one.gather(1, others) / tau, dim=1) for one in (scores, teacher))
    return (target.exp() * (target - student)).sum(1)


class FedNTDParams(Settings):
    """``beta``: weight of the distillation, 0 or more (0 is FedAvg); ``tau``: its temperature."""

    beta: float = Field(1.0, ge=0)
    tau: float = Field(1.0, gt=0)


class NotTrue(Objective[FedNTDParams]):
    """Cross-entropy + beta tau^2 KL(teacher || student) over the labels that are not the true one."""

    def prepare(self, visit: Visit) -> Prepared:
        """Keep the received model as the teacher."""
        others = other_labels(visit.classes, visit.y.device)
        return {"params": visit.params, "buffers": visit.buffers, "others": others}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        """Return the scalar loss of one batch."""
        scores, own = net.logits(params, buffers, batch.x), self.params
        loss = cross_entropy(scores, batch)
        if not own.beta:
            return loss
        teacher = net.logits(prepared["params"], prepared["buffers"], batch.x, train=False)
        gap = not_true(scores, teacher, prepared["others"][batch.y], own.tau)
        return loss + own.beta * own.tau**2 * batch.mean(gap)


class FedNTD(SingleModel[FedNTDParams]):
    """Lee et al., Preservation of the Global Knowledge by Not-True Distillation in Federated Learning, NeurIPS 2022.

    Client k minimises ``CE + beta tau^2 KL(q_G || q_w)``; q is the softmax with temperature tau over the logits of all
    labels but the true one, G the received model. The server averages as FedAvg does, by examples.

    State: the global model; clients keep none. Wire: one model down, one up.

    Deviation: the teacher runs in evaluation behaviour, one fixed function during a visit.
    """

    Objective = NotTrue
