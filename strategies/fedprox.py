"""FedProx: FedAvg with a proximal term that keeps the clients' models near the global model."""

from pydantic import Field
from torch import Tensor

from fedcross.core.settings import Settings
from fedcross.strategies.objective import Objective, Prepared, Visit, flatten
from fedcross.strategies.parts.single_model import SingleModel


class FedProxParams(Settings):
    mu: float = Field(0.01, ge=0, description="weight of the proximal term; 0 is FedAvg")


class Proximal(Objective[FedProxParams]):
    """Cross-entropy + (mu/2) ||w - G||^2, the second term through its gradient mu (w - G)."""

    def prepare(self, visit: Visit) -> Prepared:
        return {"anchor": flatten(visit.params)}

    def gradient(self, flat: Tensor, prepared: Prepared) -> Tensor | None:
        mu = self.params.mu
        return mu * (flat - prepared["anchor"]) if mu else None


class FedProx(SingleModel[FedProxParams]):
    """Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.

    Client k minimises ``F_k(w) + (mu/2) ||w - G||^2`` over parameters; the server averages as FedAvg does, by examples.

    State and wire: FedAvg's. Deviation: every client does the same local work; the reported loss is the cross-entropy.
    """

    Objective = Proximal
