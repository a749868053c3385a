"""FedProx: FedAvg with a proximal term that keeps the clients' models near the global model."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from fedcross.core.settings import Settings
from fedcross.strategies.objective import Objective, Prepared, Visit, flatten
from fedcross.strategies.parts.single_model import SingleModel


class FedProxParams(Settings):
    """``mu``: weight of the proximal term, 0 or more; 0 is FedAvg."""

    mu: float = Field(0.01, ge=0)


class Proximal(Objective[FedProxParams]):
    """Cross-entropy + (mu/2) ||w - G||^2, the second term through its gradient mu (w - G)."""

    def prepare(self, visit: Visit) -> Prepared:
        """Keep the received parameters, flat (p,)."""
        return {"anchor": flatten(visit.params)}

    def gradient(self, flat: Tensor, prepared: Prepared) -> Tensor | None:
        """Return ``mu (w - G)``, shape (p,)."""
        mu = self.params.mu
        return mu * (flat - prepared["anchor"]) if mu else None


class FedProx(SingleModel[FedProxParams]):
    """Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020.

    Client k minimises ``F_k(w) + (mu/2) ||w - G||^2`` over parameters; the server averages as FedAvg does, by examples.

    State: the global model; clients keep none. Wire: one model down, one up.

    Deviation: every client does the same local work. The reported training loss is the cross-entropy alone.
    """

    Objective = Proximal
