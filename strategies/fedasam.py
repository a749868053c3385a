"""FedASAM: FedSAM with a neighbourhood that is wider for larger weights (ASAM)."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from fedcross.strategies.fedsam import FedSAM, FedSAMParams, Sharpness
from fedcross.strategies.objective import Prepared, Visit
from fedcross.strategies.parts.vectors import TINY


class FedASAMParams(FedSAMParams):
    """Settings of FedASAM, beside those of FedSAM.

    Parameters
    ----------
    rho : float
        Length of the way in scaled weights; 0 is FedAvg.
    eta : float
        Added to the size of a weight in its scale.
    """

    rho: float = Field(0.7, ge=0)
    eta: float = Field(0.2, ge=0)


class AdaptiveSharpness(Sharpness[FedASAMParams]):
    """Cross-entropy, whose gradient is taken at ``w + rho T^2 g/|T g|``."""

    def prepare(self, visit: Visit) -> Prepared:
        """Return which parameters are scaled, 1 or 0, flat (p,): those with ``weight`` in their name."""
        super().prepare(visit)
        scaled = [torch.full_like(p, float("weight" in name)) for name, p in visit.params.items()]
        return {"scaled": torch.cat([one.reshape(-1) for one in scaled])}

    def ascent(self, flat: Tensor, gradient: Tensor, prepared: Prepared) -> Tensor | None:
        """Return ``rho T^2 g/|T g|``, T = |w| + eta for scaled parameters and 1 for others."""
        own = self.params
        if not own.rho:
            return None
        scale = torch.where(prepared["scaled"] > 0, flat.abs() + own.eta, torch.ones_like(flat))
        pulled = scale * gradient
        way: Tensor = scale * pulled * (own.rho / (torch.linalg.vector_norm(pulled) + TINY))
        return way


class FedASAM(FedSAM[FedASAMParams]):
    """Caldarola, Caputo and Ciccone, ECCV 2022, with Kwon et al.'s adaptive SAM (ASAM, ICML 2021).

    As FedSAM, but the second gradient is that at ``w + rho T^2 g/|T g|``, with the elementwise scale ``T = |w| + eta``
    for weights. Parameters without ``weight`` in their name (biases) have T = 1, as in the authors' code. ``swa`` is
    FedSAM's.

    State: the global model; with `swa` the average and the number of its models; clients keep none. Wire: one model
    down, one up. A client computes two gradients a step.

    Deviations: those of FedSAM. The published scripts have rho .5 and eta 0 marked as to be changed; the paper has .7
    and .2 for CIFAR-10.
    """

    Objective = AdaptiveSharpness
