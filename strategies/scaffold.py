"""SCAFFOLD: local gradients corrected by control variates, one on the server and one kept by every client."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

import numpy as np
from pydantic import Field
from torch import Tensor
from typing_extensions import TypeVar

from fedcross.strategies.method import Round, Settings, Task, Upload
from fedcross.strategies.objective import Objective, Outcome, Prepared, Trained, Visit, flatten
from fedcross.strategies.parts.averaging import effective_steps, move
from fedcross.strategies.parts.single_model import ModelState, SingleModel, to_all
from fedcross.strategies.parts.vectors import kept, named, vector
from fedcross.strategies.wire.records import Arrays, spec_of


class ScaffoldParams(Settings):
    weighting: Literal["uniform", "examples"] = "uniform"
    server_lr: float = Field(1.0, gt=0)
    steps: Literal["momentum", "plain"] = "momentum"
    momentum: float = Field(0.0, ge=0, lt=1)

    def remarks(self) -> list[str]:
        if self.steps == "momentum" or not self.momentum:
            return []
        return [f"method.steps=plain: momentum makes variates up to {1 / (1 - self.momentum):.1f} times too long."]


class Controlled(Objective[Any]):
    assumes_sgd = True
    keeps = True
    needs = sends = frozenset({"control"})

    def prepare(self, visit: Visit) -> Prepared:
        """Return G, c, c_i and ``c - c_i``, each flat (p,)."""
        control, own = vector(visit.extras["control"], visit.params), kept(visit)
        return {"start": flatten(visit.params), "control": control, "own": own, "correction": control - own}

    def gradient(self, flat: Tensor, prepared: Prepared) -> Tensor | None:
        return cast("Tensor", prepared["correction"])

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        """Keep ``c_i+ = c_i - c + (G - w) / (steps lr)`` and send ``c_i+ - c_i``."""
        momentum = self.params.momentum if self.params.steps == "momentum" else 0.0
        way = (prepared["start"] - trained.flat.detach()) / (effective_steps(trained.steps, momentum) * visit.lr)
        new = prepared["own"] - prepared["control"] + way
        return Outcome({"control": named(new - prepared["own"], visit)}, named(new, visit))


@dataclass
class ScaffoldState(ModelState):
    total: Arrays = field(default_factory=dict)


P = TypeVar("P", bound=ScaffoldParams, default=ScaffoldParams)
C = TypeVar("C", bound=ScaffoldState, default=ScaffoldState)


class Scaffold(SingleModel[P, C]):
    """Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, option II.

    Client i steps along ``g - c_i + c`` and then sets ``c_i+ = c_i - c + (G - w_i) / (tau lr)``, tau its steps. The
    server sets ``G += server_lr (mean w_i - G)`` and ``c += sum_i (c_i+ - c_i) / N``. All variates start at zero.

    State: G and the variates' sum; every client keeps c_i. Wire: the model and c down, the model and ``c_i+ - c_i`` up;
    statistics of batch normalisation have no variates.
    Deviations: with momentum the drift is divided by the effective number of steps. Weight decay is part of c_i.
    """

    Objective = Controlled
    zeros: ClassVar[tuple[str, ...]] = ("total",)

    def dispatch(self, state: C, round: Round) -> list[Task]:
        """Send the global model and ``c = sum / N``; expect the change of the client's variate."""
        count, returns = max(state.population, 1), {"control": spec_of(state.total)}
        control = {name: np.divide(array, count, dtype=array.dtype) for name, array in state.total.items()}
        return to_all(state.model, round, extras={"control": control}, returns=returns)

    def step(self, state: C, round: Round, uploads: list[Upload], sent: Arrays) -> dict[str, float] | None:
        move(state.model, sent, self.params.server_lr, state.total)
        for name, total in state.total.items():
            changes = [total, *(upload.extras["control"][name] for upload in uploads)]
            state.total[name] = np.asarray(np.sum(changes, axis=0, dtype=total.dtype))
        return None
