"""FedLESAM-D: FedDyn with the gradient uphill along the last global step, at the price of one gradient a step."""

from pydantic import Field
from torch import Tensor

from fedcross.strategies.feddyn import Dual, DualParams, FedDyn
from fedcross.strategies.objective import Batch, Net, Outcome, Prepared, Tensors, Trained, Visit, unflatten
from fedcross.strategies.parts.vectors import keep, kept, scaled, shifted


class FedLESAMParams(DualParams):
    rho: float = Field(0.01, ge=0)


class Estimated(Dual):
    def prepare(self, visit: Visit) -> Prepared:
        """Return FedDyn's vectors and the way uphill, by name; it is zero at a client's first visit."""
        found = super().prepare(visit)
        way = scaled(kept(visit, "old", found["start"]) - found["start"], self.params.rho)
        return {**found, "way": unflatten(way, visit.params)}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        return super().loss(net, shifted(params, prepared["way"]), buffers, batch, prepared)

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        state = super().finish(visit, trained, prepared).state or {}
        return Outcome(state=state | keep(visit, old=prepared["start"]))


class FedLESAM(FedDyn[FedLESAMParams]):
    """Fan et al., Locally Estimated Global Perturbations are Better than Local Perturbations for FedSAM, ICML 2024.

    The variant FedLESAM-D. Client u steps along ``g(w + e) + a (w - G + h_u)`` with ``e = rho (G_old - G)/|G_old - G|``
    where G_old is the model that it received at its last visit. The server sets ``G = mean_S w_u + mean_N h_u``.

    State and wire: FedDyn's; every client also keeps G_old. A client computes one gradient a step.
    Deviations: FedDyn's. Statistics of batch normalisation and the reported loss are those at ``w + e``.
    """

    Objective = Estimated
