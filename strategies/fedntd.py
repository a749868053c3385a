"""FedNTD: FedAvg with distillation from the global model over the labels that are not an example's true one."""

import torch
from pydantic import Field
from torch import Tensor

from fedcross.core.settings import Settings
from fedcross.strategies.objective import Batch, Net, Objective, Prepared, Tensors, Visit
from fedcross.strategies.parts.losses import cross_entropy, divergence
from fedcross.strategies.parts.single_model import SingleModel


class FedNTDParams(Settings):
    beta: float = Field(1.0, ge=0)
    tau: float = Field(1.0, gt=0)


class NotTrue(Objective[FedNTDParams]):
    def prepare(self, visit: Visit) -> Prepared:
        """Keep the received model as the teacher, and for each label the others, int64 (classes, classes - 1)."""
        labels = torch.arange(visit.classes, device=visit.y.device)
        others = labels[None, :-1] + (labels[None, :-1] >= labels[:, None])
        return {"params": visit.params, "buffers": visit.buffers, "others": others}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        scores, own = net.logits(params, buffers, batch.x), self.params
        loss = cross_entropy(scores, batch)
        if not own.beta:
            return loss
        teacher = net.logits(prepared["params"], prepared["buffers"], batch.x, train=False)
        others = prepared["others"][batch.y]
        gap = divergence(scores.gather(1, others), teacher.gather(1, others), own.tau)
        return loss + own.beta * own.tau**2 * batch.mean(gap)


class FedNTD(SingleModel[FedNTDParams]):
    """Lee et al., Preservation of the Global Knowledge by Not-True Distillation in Federated Learning, NeurIPS 2022.

    Client k minimises ``CE + beta tau^2 KL(q_G || q_w)``; q is the softmax with temperature tau over the logits of all
    labels but the true one, G the received model. The server averages as FedAvg does, by examples.

    State and wire: FedAvg's. Deviation: the teacher runs in evaluation behaviour, one fixed function during a visit.
    """

    Objective = NotTrue
