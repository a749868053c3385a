"""FedLC: clients train with a margin for their rare classes, calibrated by their own label counts."""

import torch
from pydantic import Field
from torch import Tensor

from fedcross.core.settings import Settings
from fedcross.strategies.objective import Batch, Net, Objective, Prepared, Tensors, Visit
from fedcross.strategies.parts.losses import cross_entropy
from fedcross.strategies.parts.single_model import SingleModel


class FedLCParams(Settings):
    tau: float = Field(1.0, ge=0)


class Calibrated(Objective[FedLCParams]):
    def prepare(self, visit: Visit) -> Prepared:
        """Return the margins (classes,)."""
        counts = torch.bincount(visit.y, minlength=visit.classes).to(next(iter(visit.params.values())).dtype)
        return {"margin": self.params.tau * counts.clamp(min=1e-8) ** -0.25}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        return cross_entropy(net.logits(params, buffers, batch.x) - prepared["margin"], batch)


class FedLC(SingleModel[FedLCParams]):
    """Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022.

    Client k minimises the cross-entropy of ``f_c(x) - tau n_c^(-1/4)``, n_c the examples of class c in this visit: rare
    classes need a larger margin. Predictions use f itself. The server averages as FedAvg does, by examples.

    State and wire: FedAvg's. Deviations: the formula's denominator sums over the other classes; here, in Flower's
    baseline and in fluke over all. An absent class has an infinite margin in the formula; here n_c is at least 1e-8, so
    training leaves that logit alone. The reported training loss has the margins.
    """

    Objective = Calibrated
