"""FedSpeed: FedDyn whose clients take the gradient uphill of their model, as SAM does."""

from pydantic import Field

from fedcross.strategies.feddyn import Dual, DualParams, FedDyn
from fedcross.strategies.fedsam import Uphill


class FedSpeedParams(DualParams):
    rho: float = Field(0.1, ge=0)


class Speed(Uphill, Dual):
    """FedDyn's loss, with the gradient of cross-entropy taken at ``w + rho g/|g|``."""


class FedSpeed(FedDyn[FedSpeedParams]):
    """Sun et al., FedSpeed: Larger Local Interval, Less Communication Round, and Higher Generalization Accuracy, 2023.

    ICLR 2023. Client u steps along ``g(w + rho g/|g|) + a (w - G + h_u)`` and then sets ``h_u += w_u - G``. The server
    sets ``G = mean_S w_u + mean_N h_u``. State and wire: FedDyn's. A client computes two gradients a step.

    Deviations: those of FedDyn and, in batch normalisation and dropout, FedSAM. As in the authors' code
    (woodenchild95/FL-Simulator), the gradient uphill replaces the first one, while the paper mixes both with a weight.
    It clips before it adds ``a w``; here the whole term is clipped.
    """

    Objective = Speed
