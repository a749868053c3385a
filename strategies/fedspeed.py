"""FedSpeed: FedDyn whose clients take the gradient uphill of their model, as SAM does."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from fedcross.strategies.objective import Prepared
from fedcross.strategies.parts.duals import Dual, DualParams, DualServer
from fedcross.strategies.parts.vectors import scaled


class FedSpeedParams(DualParams):
    """Settings of FedSpeed, beside those of FedDyn: ``rho``, the length of the way uphill; 0 is FedDyn."""

    rho: float = Field(0.1, ge=0)


class Speed(Dual[FedSpeedParams]):
    """FedDyn's loss, with the gradient of cross-entropy taken at ``w + rho g/|g|``."""

    def ascent(self, flat: Tensor, gradient: Tensor, prepared: Prepared) -> Tensor | None:
        """Return ``rho g/|g|``."""
        rho = self.params.rho
        return scaled(gradient, rho) if rho else None


class FedSpeed(DualServer[FedSpeedParams]):
    """Sun et al., FedSpeed: Larger Local Interval, Less Communication Round, and Higher Generalization Accuracy, 2023.

    ICLR 2023. Client u steps along ``g(w + rho g/|g|) + a (w - G + h_u)`` and then sets ``h_u += w_u - G``. The server
    sets ``G = mean_S w_u + mean_N h_u``.

    State: G, the last uploads' mean, the sum of all h_u; every client keeps h_u. Wire: one model down, one up. A client
    computes two gradients a step.

    Compared with the authors' code (woodenchild95/FL-Simulator): as there, the gradient uphill replaces the first one,
    while the paper mixes both with a weight. It clips before it adds ``a w``; here the whole term is clipped.

    Deviations: as :class:`strategies.feddyn.FedDyn`; batch normalisation and dropout as
    :class:`strategies.fedsam.FedSAM`.
    """

    Objective = Speed
