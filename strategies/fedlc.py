"""FedLC: clients train with a margin for their rare classes, calibrated by their own label counts."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedcross.core.settings import Settings
from fedcross.strategies.objective import Batch, Net, Objective, Prepared, Tensors, Visit
from fedcross.strategies.parts.single_model import SingleModel

#: The count of a class that a client does not have: its margin is 100 tau.
ABSENT = 1e-8


class FedLCParams(Settings):
    """``tau``: weight of the margins, 0 or more; 0 is FedAvg."""

    tau: float = Field(1.0, ge=0)


class Calibrated(Objective[FedLCParams]):
    """Cross-entropy of logits minus ``tau n_c^(-1/4)``, n_c the client's examples of class c."""

    def prepare(self, visit: Visit) -> Prepared:
        """Return the margins (classes,)."""
        like = next(iter(visit.params.values()))
        counts = torch.bincount(visit.y, minlength=visit.classes).to(like.dtype)
        return {"margin": self.params.tau * counts.clamp(min=ABSENT) ** -0.25}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        """Return the scalar loss of one batch."""
        scores = net.logits(params, buffers, batch.x) - prepared["margin"]
        return batch.mean(functional.cross_entropy(scores, batch.y, reduction="none"))


class FedLC(SingleModel[FedLCParams]):
    """Zhang et al., Federated Learning with Label Distribution Skew via Logits Calibration, ICML 2022.

    Client k minimises the cross-entropy of ``f_c(x) - tau n_c^(-1/4)``, n_c the number of its examples of class c that
    it uses in this visit. Rare classes then need a larger margin in training. Predictions use f itself. The server
    averages as FedAvg does, by examples.

    State: the global model; clients keep none. Wire: one model down, one up.

    Deviations and choices: no code of the authors was found. Their formula sums over the other classes in the
    denominator, public reimplementations (Flower's baseline, fluke) and this one over all, which is a cross-entropy. A
    class that a client does not have has an infinite margin in the formula; here n_c is at least 1e-8, so the margin is
    100 tau, and the client's training leaves such a class's logit alone. The reported training loss has the margins.
    """

    Objective = Calibrated
