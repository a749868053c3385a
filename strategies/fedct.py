"""FedCT: models train further at matching clients, guided by fused prototypes of two views, with mixed embeddings."""

from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from fedcross.strategies.fedexg import BIAS, GROUP, WEIGHT, Crossing, FedExg, FedExgParams, FedExgState
from fedcross.strategies.method import Arrays, Round
from fedcross.strategies.moon import Contrast, MoonParams, project
from fedcross.strategies.objective import Batch, Net, Outcome, Prepared, Tensors, Trained, Visit
from fedcross.strategies.parts.losses import each
from fedcross.strategies.parts.matching import MATCHINGS, Costs, Hosts, Stay, consistency
from fedcross.strategies.parts.prototypes import average, contrast, fuse, neighbours


class FedCTParams(FedExgParams, MoonParams):
    base: Literal["fedavg", "moon"] = "fedavg"
    broadcast: Literal["consistency", "inconsistency", "random"] = "consistency"
    matching: Literal["assignment", "greedy", "literal"] = "assignment"
    fusion: float = Field(0.5, ge=0, le=1)
    kappa: float = Field(1.0, ge=0)
    eta: float = Field(0.1, ge=0)
    temperature: float = Field(0.5, gt=0)
    hard: float = Field(0.1, ge=0)
    mix: float = Field(0.5, ge=0, le=1)
    mixing: Literal["batch", "prototypes"] = "batch"

    @property
    def guides(self) -> bool:
        return self.kappa > 0 or (self.eta > 0 and self.mixing == "prototypes")

    @property
    def uses_prototypes(self) -> bool:
        return self.broadcast != "random" or self.guides

    def upload_faults(self, kind: str) -> list[str]:
        """Return an error where clients that compress uploads as `kind` could not answer what the method asks."""
        if kind == "float32" or self.matching != "literal" or self.broadcast == "random":
            return []
        return [
            f"compression.up={kind}: a client keeps one rounding error, and with method.matching=literal several "
            "models can train there at once. Choose compression.up=float32, or method.matching=assignment or greedy."
        ]


class FedctObjective(Crossing[FedCTParams]):
    """At a host ``CE + kappa APCL + eta MFA``; at home the base loss."""

    halves = True

    def __init__(self, params: FedCTParams) -> None:
        super().__init__(params)
        self.keeps, self.moon = params.base == "moon", Contrast(params)

    def prepare(self, visit: Visit) -> Prepared:
        """Return, at home, MOON's models if MOON is the base loss; at a host, the prototypes."""
        return self.moon.prepare(visit) if self.keeps and visit.exchange == 0 else super().prepare(visit)

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        outcome = super().finish(visit, trained, prepared)
        if self.keeps:
            outcome.state = visit.state if visit.exchange else self.moon.finish(visit, trained, prepared).state
        return outcome

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        p = self.params
        if "global" in prepared:
            return self.moon.loss(net, params, buffers, batch, prepared)
        if not prepared or p.kappa == p.eta == 0:
            return super().loss(net, params, buffers, batch, prepared)
        features = net.features(params, buffers, batch.x)
        loss = each(net.classify(params, buffers, features), batch.y)
        if p.kappa:
            loss = loss + p.kappa * self.apcl(features, batch.y, prepared)
        if p.eta:
            loss = loss + p.eta * self.mixed(net, params, buffers, features, batch, prepared)
        return batch.mean(loss)

    def apcl(self, features: Tensor, y: Tensor, prepared: Prepared) -> Tensor:
        """Return ``-log softmax_y(cos(f_hy, u_f) / tau_2)``, ``f_hy = f + hard (f - u_f^y)``: Eq. 6-8, (batch,)."""
        vectors, present = prepared["vectors"], prepared["present"]
        hardened = features + self.params.hard * (features - vectors[y])
        return contrast(hardened, y, vectors, present, self.params.temperature)

    def mixed(
        self, net: Net, params: Tensors, buffers: Tensors, features: Tensor, batch: Batch, prepared: Prepared
    ) -> Tensor:
        """Return ``m CE(H(f_mix), y_a) + (1 - m) CE(H(f_mix), y_b)``, ``f_mix = m f_a + (1 - m) f_b``, (batch,).

        Eq. 9-10. With ``mixing=prototypes`` the fused prototype of class y_b, where there is one, stands for f_b.
        """
        share, other = self.params.mix, neighbours(batch)
        second, label = features[other], batch.y[other]
        if self.params.mixing == "prototypes":
            second = torch.where(prepared["present"][label].unsqueeze(1), prepared["vectors"][label], second)
        scores = net.classify(params, buffers, share * features + (1 - share) * second)
        return share * each(scores, batch.y) + (1 - share) * each(scores, label)


class FedCT(FedExg[FedCTParams]):
    """Qi et al., Cross-Training with Multi-View Knowledge Fusion for Heterogeneous Federated Learning, 2024.

    Phase I: each client trains with the base loss and computes its prototypes ``u^k``, the class means of embeddings.
    Phase II: the server computes ``v_ij = CE(H_i(U_j), Y_j)``, how well model i recognises client j's prototypes, and
    sends the models to clients so that the sum is smallest (``consistency``) or largest (``inconsistency``), or at
    random (``random``). Phase III: the host minimises ``CE + kappa APCL + eta MFA`` with
    ``U_f = fusion U_g + (1 - fusion) U_l``, U_g the mean over clients and U_l the prototypes that the model had at its
    last client. Phase IV: the server averages the models, weighted by the examples n_k of their homes or hosts.

    State: the global model. Wire: N_e + 1 models down and up; prototypes (classes x embedding) up and down N_e times.

    Decisions where the paper is silent or ambiguous:

    - Literally, every model goes to its own argmin, so clients get several models or none; the text speaks of one each.
      Default: the permutation of least total cost, no model staying; also ``greedy`` (models in order, without
      replacement) and ``literal``.
    - Prototypes are computed in evaluation mode without augmentation, and are constants in the loss.
    - If a client lacks a class, U_g averages over the others, v_ij over the classes present, and U_f takes the other
      view. A class that both views lack is left out of the softmax; its examples have no APCL.
    - Eq. 10's mixed label is manifold mixup with a fixed share; the partner is the neighbour in the random batch. The
      text also says that MFA reuses "the class-aware prototypes": ``mixing=prototypes``.
    - N_e > 1: each host computes prototypes anew and models are matched again; only a model's last client is excluded.
    - ``base=moon``: phase I is MOON's, with its head and the model of the client's last phase I.
    """

    Objective = FedctObjective

    def network(self, model: nn.Module, deployed: bool = False) -> nn.Module:
        return project(model, self.params, "FedCT") if self.params.base == "moon" and not deployed else model

    def match(self, state: FedExgState, round: Round, clients: list[int], stay: Stay) -> Hosts:
        if self.params.broadcast == "random":
            return super().match(state, round, clients, stay)
        values = self.consistencies(state, clients)
        costs = values if self.params.broadcast == "consistency" else -values
        hosts = MATCHINGS[self.params.matching](costs, stay)
        state.metrics = {"route_consistency": float(values[np.arange(len(hosts)), hosts].mean())}
        return hosts

    def consistencies(self, state: FedExgState, clients: list[int]) -> Costs:
        """Return ``v_ij`` of the models, by slot, and the `clients`, (models, clients), in nats."""
        models = [learner.arrays for _, learner in sorted(state.learners.items())]
        rows = [[consistency(m[WEIGHT], m.get(BIAS), **state.latest[c]) for c in clients] for m in models]
        return np.array(rows)

    def guidance(self, state: FedExgState, slot: int) -> dict[str, Arrays]:
        if not self.params.guides:
            return {}
        overall = average([state.latest[client] for client in sorted(state.latest)])
        return {GROUP: fuse(overall, state.learners[slot].extras[GROUP], self.params.fusion)}
