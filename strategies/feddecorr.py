"""FedDecorr: FedAvg with a penalty on correlated dimensions of the embedding."""

import torch
from pydantic import Field
from torch import Tensor

from fedcross.core.settings import Settings
from fedcross.strategies.objective import Batch, Net, Objective, Prepared, Tensors
from fedcross.strategies.parts.losses import embedded
from fedcross.strategies.parts.single_model import SingleModel


def decorrelation(z: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean over pairs of different dimensions of ``((X^T X)_ij)^2 / n``, a scalar.

    X is `z`, shape (batch, e), each dimension standardised over the n real rows (variance over n - 1). 0 for one row or
    one dimension. `mask`, shape (batch,), is 1 for real rows and 0 for padding; None: all are real.
    """
    real = torch.ones_like(z[:, 0]) if mask is None else mask.to(z.dtype)
    n, row = real.sum().clamp(min=1), real[:, None]
    centred = (z - (z * row).sum(0) / n) * row
    variance = centred.pow(2).sum(0) / (n - 1).clamp(min=1)
    x = centred / torch.sqrt(variance + 1e-8)  # a dimension may be constant
    others = (x.T @ x) * (1 - torch.eye(z.shape[1], dtype=z.dtype, device=z.device))
    return others.pow(2).sum() / max(z.shape[1] * (z.shape[1] - 1), 1) / n


class FedDecorrParams(Settings):
    beta: float = Field(0.1, ge=0, description="weight of the penalty; 0 is FedAvg")


class Decorrelated(Objective[FedDecorrParams]):
    halves = True

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        z, loss = embedded(net, params, buffers, batch)
        beta = self.params.beta
        return loss + beta * decorrelation(z, batch.mask) if beta else loss


class FedDecorr(SingleModel[FedDecorrParams]):
    """Shi et al., Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated Learning.

    ICLR 2023. Client k minimises ``CE + beta D``, D the :func:`decorrelation` of penultimate features. The server
    averages as FedAvg does, by examples. State and wire: FedAvg's.

    Deviations: D is that of the authors' code, the mean off-diagonal ``(X^T X)^2 / batch``, for which beta is
    published; the paper's ``||K||_F^2 / d^2`` has correlations and counts the diagonal. D is 0 for a single example.
    """

    Objective = Decorrelated
