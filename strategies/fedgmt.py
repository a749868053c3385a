"""FedGMT: clients stay near the predictions of the global model's moving average, beside FedDyn's linear term."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedcross.strategies.method import Round, Start, Task, Upload
from fedcross.strategies.objective import Batch, Net, Outcome, Prepared, Tensors, Trained, Visit, as_tensors, unflatten
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.duals import Dual, DualParams, DualServer, DualState
from fedcross.strategies.parts.vectors import keep, kept
from fedcross.strategies.wire.records import Arrays


class FedGMTParams(DualParams):
    """Settings of FedGMT, beside those of FedDyn.

    Parameters
    ----------
    gamma, tau : float
        Weight of the divergence from the moving average, and its temperature.
    decay : float
        Share of its old value that the moving average keeps in a round.
    """

    gamma: float = Field(1.0, ge=0)
    tau: float = Field(3.0, gt=0)
    decay: float = Field(0.95, ge=0, lt=1)


class Trajectory(Dual[FedGMTParams]):
    """Cross-entropy + gamma tau^2 KL(softmax(E/tau) || softmax(w/tau)) + alpha <h_u, w>, E frozen.

    Under a server that sends no E, the client keeps one of its own: in a visit that comes n rounds after the last one,
    ``E = decay^n E + (1 - decay^n) w``, w the received model. At its first visit E is that model.
    """

    def prepare(self, visit: Visit) -> Prepared:
        """Return FedDyn's vectors, and parameters and buffers of E."""
        found, sent = super().prepare(visit), visit.extras.get("average")
        if sent is not None:
            average = as_tensors(sent, like=found["start"])
            params = {name: average[name] for name in visit.params}
            return {**found, "params": params, "buffers": {name: average[name] for name in visit.buffers}}
        share = self.params.decay ** (visit.round - int(visit.state.get("round", visit.round)))
        own = share * kept(visit, "average", found["start"]) + (1 - share) * found["start"]
        return {**found, "own": own, "params": unflatten(own, visit.params), "buffers": visit.buffers}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        """Return the scalar loss of one batch, without the linear term."""
        scores, own = net.logits(params, buffers, batch.x), self.params
        loss = batch.mean(functional.cross_entropy(scores, batch.y, reduction="none"))
        if not own.gamma:
            return loss
        average = net.logits(prepared["params"], prepared["buffers"], batch.x, train=False)
        target = functional.log_softmax(average / own.tau, 1)
        gap = target.exp() * (target - functional.log_softmax(scores / own.tau, 1))
        return loss + own.gamma * own.tau**2 * batch.mean(gap.sum(1))

    def gradient(self, flat: Tensor, prepared: Prepared) -> Tensor | None:
        """Return ``alpha h_u``."""
        alpha = self.params.alpha
        return alpha * prepared["dual"] if alpha else None

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        """Keep h_u and, if the server sends none, E and the number of this round."""
        state = super().finish(visit, trained, prepared).state or {}
        if "average" not in visit.extras:
            state |= {**keep(visit, average=prepared["own"]), "round": np.array(visit.round)}
        return Outcome(state=state)


@dataclass
class FedGMTState(DualState):
    """That of FedDyn, and E, the moving average of the global model."""

    average: Arrays = field(default_factory=dict)


class FedGMT(DualServer[FedGMTParams, FedGMTState]):
    """Li et al., One Arrow, Two Hawks: Sharpness-aware Minimization for Federated Learning via Global Model Trajectory.

    ICML 2025. Client u minimises ``CE + gamma tau^2 KL(softmax(E/tau) || softmax(w/tau)) + a <h_u, w>`` and then sets
    ``h_u += w_u - G``. The server sets ``G = mean_S w_u + mean_N h_u`` and ``E = b E + (1 - b) G``, b the decay.

    State: FedDyn's and E; every client keeps h_u. Wire: two models down, one up. A client computes the scores of two
    models a step.

    Compared with the authors' code (harrylee999/FL-SAM): the same rule.

    Deviations: as :class:`strategies.feddyn.FedDyn`. E averages statistics of batch normalisation too, and runs in
    evaluation behaviour. The reported training loss has the divergence, not the linear term.
    """

    Objective = Trajectory

    def init(self, start: Start) -> FedGMTState:
        """Keep the initial model, which E begins at."""
        state = super().init(start)
        return FedGMTState(**vars(state), average=state.model)

    def dispatch(self, state: FedGMTState, round: Round) -> list[Task]:
        """Send the global model and E."""
        return [replace(task, extras={"average": state.average}) for task in super().dispatch(state, round)]

    def aggregate(self, state: FedGMTState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Aggregate as FedDyn does, and move E."""
        metrics, decay = super().aggregate(state, round, uploads), self.params.decay
        if uploads:
            state.average = weighted_mean([state.average, state.model], [decay, 1 - decay])
        return metrics
