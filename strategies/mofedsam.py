"""MoFedSAM: FedCM whose clients take the gradient uphill of their model, as SAM does."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from fedcross.strategies.fedcm import ClientMomentum, FedCM, FedCMParams
from fedcross.strategies.objective import Prepared
from fedcross.strategies.parts.vectors import scaled


class MoFedSAMParams(FedCMParams):
    """Settings of MoFedSAM, beside those of FedCM: ``rho``, the length of the way uphill; 0 is FedCM."""

    rho: float = Field(0.1, ge=0)


class SharpMomentum(ClientMomentum[MoFedSAMParams]):
    """Cross-entropy, whose gradient g at ``w + rho g/|g|`` is mixed with the momentum D: ``a g + (1 - a) D``."""

    def ascent(self, flat: Tensor, gradient: Tensor, prepared: Prepared) -> Tensor | None:
        """Return ``rho g/|g|``."""
        rho = self.params.rho
        return scaled(gradient, rho) if rho else None


class MoFedSAM(FedCM[MoFedSAMParams]):
    """Qu et al., Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022.

    Clients step along ``a g(w + rho g/|g|) + (1 - a) D`` with ``D = (G_{t-1} - G_t) / (steps lr)``. The server takes
    the uniform mean.

    State: G and its last step; clients keep none. Wire: two models down, one up. A client computes two gradients a
    step.

    Compared with public code (woodenchild95/FL-Simulator): the same rule.

    Deviations: as :class:`strategies.fedcm.FedCM`; batch normalisation and dropout as
    :class:`strategies.fedsam.FedSAM`.
    """

    Objective = SharpMomentum
