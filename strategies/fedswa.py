"""FedSWA: a learning rate that falls within each visit, and a global step longer than the clients' mean."""

from typing import Any

from pydantic import Field
from torch import Tensor

from fedcross.strategies.method import Arrays, Round, Settings, Upload
from fedcross.strategies.objective import Objective
from fedcross.strategies.parts.averaging import move
from fedcross.strategies.parts.single_model import ModelState, SingleModel


class FedSWAParams(Settings):
    ratio: float = Field(0.1, ge=0, le=1)
    server_lr: float = Field(1.0, gt=0)


class Falling(Objective[Any]):
    assumes_sgd = True

    def rate(self, number: int, steps: int | Tensor) -> float | Tensor:
        fall: float = 1 - self.params.ratio
        return 1 - fall * number / steps


class FedSWA(SingleModel[FedSWAParams]):
    """Liu et al., Improving Generalization in Federated Learning with Highly Heterogeneous Data, ICML 2025.

    Step k of the T steps of a visit has the learning rate ``lr (1 - (1 - r) k / T)``. The server sets
    ``G += s (mean w_u - G)``, the mean uniform, s its learning rate, for all floating entries as in the authors' code.

    State and wire: FedAvg's. The paper has s from 1 to 1.5.
    Deviations: the authors' code (junkangLiu0/FedSWA) has r = 0 and doubles the learning rate, here ``train.lr``.
    """

    Objective = Falling
    weighting = "uniform"

    def step(self, state: ModelState, round: Round, uploads: list[Upload], sent: Arrays) -> None:
        move(state.model, sent, self.params.server_lr, [name for name, a in sent.items() if a.dtype.kind == "f"])
