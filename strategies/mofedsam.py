"""MoFedSAM: FedCM whose clients take the gradient uphill of their model, as SAM does."""

from pydantic import Field

from fedcross.strategies.fedcm import ClientMomentum, FedCM, FedCMParams
from fedcross.strategies.fedsam import Uphill


class MoFedSAMParams(FedCMParams):
    rho: float = Field(0.1, ge=0)


class SharpMomentum(Uphill, ClientMomentum):
    """Cross-entropy, whose gradient g at ``w + rho g/|g|`` is mixed with the momentum D: ``a g + (1 - a) D``."""


class MoFedSAM(FedCM):
    """Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022.

    Clients step along ``a g(w + rho g/|g|) + (1 - a) D`` with ``D = (G_{t-1} - G_t) / (steps lr)``. The server takes
    the uniform mean. Public code (woodenchild95/FL-Simulator) has the same rule.

    State and wire: FedCM's. A client computes two gradients a step.
    Deviations: those of FedCM and, in batch normalisation and dropout, FedSAM.
    """

    Params = MoFedSAMParams
    Objective = SharpMomentum
