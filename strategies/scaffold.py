"""SCAFFOLD: local gradients corrected by control variates, one on the server and one kept by every client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedcross.core.settings import Settings
from fedcross.strategies import objective
from fedcross.strategies.method import Round, Start, Task, Upload
from fedcross.strategies.objective import Outcome, Prepared, Tensors, Trained, Visit, as_arrays, as_tensors, flatten
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.momentum import effective_steps
from fedcross.strategies.parts.single_model import ModelState, SingleModel
from fedcross.strategies.wire.records import Arrays, spec_of


class ScaffoldParams(Settings):
    """``weighting`` of the uploads, ``server_lr``, and which ``steps`` a client divides its drift by."""

    weighting: Literal["uniform", "examples"] = "uniform"
    server_lr: float = Field(1.0, gt=0)
    steps: Literal["momentum", "plain"] = "momentum"
    momentum: float = Field(0.0, ge=0, lt=1)

    def remarks(self) -> list[str]:
        """Return what is allowed but unusual."""
        if self.steps == "momentum" or not self.momentum:
            return []
        return [f"method.steps=plain: momentum makes variates up to {1 / (1 - self.momentum):.1f} times too long."]


class Controlled(objective.Objective[ScaffoldParams]):
    """Cross-entropy whose gradient is corrected by ``c - c_i``."""

    assumes_sgd = True
    keeps = True
    needs = sends = frozenset({"control"})

    def prepare(self, visit: Visit) -> Prepared:
        """Return G, c, c_i and ``c - c_i``, each flat (p,)."""
        start = flatten(visit.params)
        control = _in_order(visit.extras["control"], visit.params)
        own = _in_order(visit.state, visit.params) if visit.state else torch.zeros_like(start)
        return {"start": start, "control": control, "own": own, "correction": control - own}

    def gradient(self, flat: Tensor, prepared: Prepared) -> Tensor | None:
        """Return ``c - c_i``."""
        return cast("Tensor", prepared["correction"])

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        """Keep ``c_i+ = c_i - c + (G - w) / (steps lr)`` and send ``c_i+ - c_i``."""
        params = self.params
        steps = effective_steps(trained.steps, params.momentum if params.steps == "momentum" else 0.0)
        new = prepared["own"] - prepared["control"] + (prepared["start"] - trained.flat.detach()) / (steps * visit.lr)
        change, kept = (as_arrays(objective.unflatten(one, visit.params)) for one in (new - prepared["own"], new))
        return Outcome({"control": change}, kept)


def _in_order(arrays: Arrays, like: Tensors) -> Tensor:
    """Return `arrays` as one flat tensor in the order of `like`, on its device."""
    tensors = as_tensors(arrays, like=next(iter(like.values())))
    return flatten({name: tensors[name] for name in like})


@dataclass
class ScaffoldState(ModelState):
    """The global model, ``sum_i c_i`` over all clients, and N, the most clients that were connected at a draw."""

    total: Arrays
    population: int = 0


class Scaffold(SingleModel[ScaffoldParams, ScaffoldState]):
    """Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020, option II.

    Client i steps along ``g - c_i + c`` and then sets ``c_i+ = c_i - c + (G - w_i) / (tau lr)``, tau its steps. The
    server sets ``G += server_lr (mean w_i - G)`` and ``c += sum_i (c_i+ - c_i) / N``. All variates start at zero.

    State: G and the variates' sum; every client keeps c_i. Wire: the model and c down, the model and ``c_i+ - c_i`` up;
    statistics of batch normalisation have no variates.

    Deviations: with momentum the drift is divided by the effective number of steps. Weight decay is part of c_i.
    """

    Objective = Controlled

    def init(self, start: Start) -> ScaffoldState:
        """Keep the initial model; all control variates are zero."""
        zeros = {name: np.zeros_like(start.arrays[name]) for name in start.parameters}
        return ScaffoldState(super().init(start).model, zeros)

    def sample(self, state: ScaffoldState, round: Round, available: Sequence[int]) -> tuple[int, ...]:
        """Draw as every method does, and store the largest number of connected clients so far."""
        state.population = max(state.population, len(available))
        return super().sample(state, round, available)

    def dispatch(self, state: ScaffoldState, round: Round) -> list[Task]:
        """Send the global model and ``c = sum / N``; expect the change of the client's variate."""
        count, returns = max(state.population, 1), {"control": spec_of(state.total)}
        control = {name: np.divide(array, count, dtype=array.dtype) for name, array in state.total.items()}
        clients = enumerate(round.clients)
        return [Task(client, slot, state.model, {"control": control}, returns=returns) for slot, client in clients]

    def aggregate(self, state: ScaffoldState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Move the global model towards the uploads' mean, and add the changes of their control variates."""
        if not uploads:
            return {}
        weights = [1.0 if self.params.weighting == "uniform" else float(upload.num_examples) for upload in uploads]
        mean = weighted_mean([upload.arrays for upload in uploads], weights)
        for name in state.total if self.params.server_lr != 1 else ():
            step = np.multiply(np.subtract(mean[name], state.model[name]), self.params.server_lr)
            mean[name] = np.asarray(np.add(state.model[name], step), dtype=mean[name].dtype)
        state.model = mean
        for name, total in state.total.items():
            changes = [total, *(upload.extras["control"][name] for upload in uploads)]
            state.total[name] = np.asarray(np.sum(changes, axis=0, dtype=total.dtype))
        return {}
