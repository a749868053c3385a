"""FedGMT: clients stay near the predictions of the global model's moving average, beside FedDyn's linear term."""

from dataclasses import dataclass, field

import numpy as np
from pydantic import Field
from torch import Tensor

from fedcross.strategies.feddyn import Dual, DualParams, DualState, FedDyn
from fedcross.strategies.method import Arrays, Round, Task, Upload
from fedcross.strategies.objective import Batch, Net, Outcome, Prepared, Tensors, Trained, Visit, as_tensors, unflatten
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.losses import cross_entropy, divergence
from fedcross.strategies.parts.single_model import to_all
from fedcross.strategies.parts.vectors import keep, kept


class FedGMTParams(DualParams):
    gamma: float = Field(1.0, ge=0)
    tau: float = Field(3.0, gt=0)
    decay: float = Field(0.95, ge=0, lt=1)


class Trajectory(Dual):
    """Cross-entropy + gamma tau^2 KL(softmax(E/tau) || softmax(w/tau)) + alpha <h_u, w>, E frozen.

    Under a server that sends no E, the client keeps one of its own: in a visit that comes n rounds after the last one,
    ``E = decay^n E + (1 - decay^n) w``, w the received model. At its first visit E is that model.
    """

    params: FedGMTParams

    def prepare(self, visit: Visit) -> Prepared:
        """Return FedDyn's vectors, and parameters and buffers of E."""
        found, sent = super().prepare(visit), visit.extras.get("average")
        if sent is not None:
            average = as_tensors(sent, like=found["start"])
            params, buffers = ({name: average[name] for name in part} for part in (visit.params, visit.buffers))
            return {**found, "params": params, "buffers": buffers}
        share = self.params.decay ** (visit.round - int(visit.state.get("round", visit.round)))
        own = share * kept(visit, "average", found["start"]) + (1 - share) * found["start"]
        return {**found, "own": own, "params": unflatten(own, visit.params), "buffers": visit.buffers}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        scores, own = net.logits(params, buffers, batch.x), self.params
        loss = cross_entropy(scores, batch)
        if not own.gamma:
            return loss
        average = net.logits(prepared["params"], prepared["buffers"], batch.x, train=False)
        return loss + own.gamma * own.tau**2 * batch.mean(divergence(scores, average, own.tau))

    def gradient(self, flat: Tensor, prepared: Prepared) -> Tensor | None:
        alpha = self.params.alpha
        return alpha * prepared["dual"] if alpha else None

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        state = super().finish(visit, trained, prepared).state or {}
        if "average" not in visit.extras:
            state |= {**keep(visit, average=prepared["own"]), "round": np.array(visit.round)}
        return Outcome(state=state)


@dataclass
class FedGMTState(DualState):
    average: Arrays = field(default_factory=dict)


class FedGMT(FedDyn[FedGMTParams, FedGMTState]):
    """Li et al., One Arrow, Two Hawks: Sharpness-aware Minimization for Federated Learning via Global Model Trajectory.

    ICML 2025. Client u minimises ``CE + gamma tau^2 KL(softmax(E/tau) || softmax(w/tau)) + a <h_u, w>`` and then sets
    ``h_u += w_u - G``. The server sets ``G = mean_S w_u + mean_N h_u`` and ``E = b E + (1 - b) G``, b the decay.

    State: FedDyn's and E; every client keeps h_u. Wire: two models down, one up.
    Deviations: FedDyn's; the authors' code (harrylee999/FL-SAM) has the same rule. E averages statistics of batch
    normalisation too, and runs in evaluation behaviour. The reported training loss has the divergence.
    """

    Objective = Trajectory

    def dispatch(self, state: FedGMTState, round: Round) -> list[Task]:
        return to_all(state.model, round, extras={"average": state.average or state.model})

    def step(self, state: FedGMTState, round: Round, uploads: list[Upload], sent: Arrays) -> None:
        super().step(state, round, uploads, sent)
        state.average = weighted_mean([state.average or sent, state.model], [self.params.decay, 1 - self.params.decay])
