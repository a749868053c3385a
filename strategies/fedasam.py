"""FedASAM: FedSAM with a neighbourhood that is wider for larger weights (ASAM)."""

import torch
from pydantic import Field
from torch import Tensor

from fedcross.strategies.fedsam import FedSAM, FedSAMParams, Sharpness
from fedcross.strategies.objective import Prepared, Visit
from fedcross.strategies.parts.vectors import TINY


class FedASAMParams(FedSAMParams):
    rho: float = Field(0.7, ge=0)
    eta: float = Field(0.2, ge=0)


class AdaptiveSharpness(Sharpness):
    def prepare(self, visit: Visit) -> Prepared:
        """Return which parameters are scaled, 1 or 0, flat (p,): those with ``weight`` in their name."""
        super().prepare(visit)
        scaled = [torch.full_like(p, float("weight" in name)).reshape(-1) for name, p in visit.params.items()]
        return {"scaled": torch.cat(scaled)}

    def ascent(self, flat: Tensor, gradient: Tensor, prepared: Prepared) -> Tensor | None:
        if not self.params.rho:
            return None
        scale = torch.where(prepared["scaled"] > 0, flat.abs() + self.params.eta, torch.ones_like(flat))
        pulled = scale * gradient
        way: Tensor = scale * pulled * (self.params.rho / (torch.linalg.vector_norm(pulled) + TINY))
        return way


class FedASAM(FedSAM):
    """Caldarola, Caputo and Ciccone, ECCV 2022, with Kwon et al.'s adaptive SAM (ASAM, ICML 2021).

    As FedSAM, but the second gradient is that at ``w + rho T^2 g/|T g|``, with the elementwise scale ``T = |w| + eta``
    for weights. Parameters without ``weight`` in their name (biases) have T = 1, as in the authors' code.

    State, wire and deviations: FedSAM's. The published scripts have other rho and eta, marked as to be changed.
    """

    Params = FedASAMParams
    Objective = AdaptiveSharpness
