"""PGCT: random exchange of models; training at a host uses the prototypes that the model had at its last client."""

from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedcross.strategies.fedexg import Crossing, FedExg, FedExgParams, FedExgState
from fedcross.strategies.objective import Batch, Net, Prepared, Tensors
from fedcross.strategies.parts.losses import each
from fedcross.strategies.parts.prototypes import contrast, cosines
from fedcross.strategies.wire.records import Arrays


class PGCTParams(FedExgParams):
    kappa: float = Field(1.0, ge=0)
    eta: float = Field(0.1, ge=0)
    temperature: float = Field(0.5, gt=0)
    attention: float = Field(0.5, ge=0, le=1)

    @property
    def uses_prototypes(self) -> bool:
        return self.kappa > 0 or self.eta > 0


class PgctObjective(Crossing[PGCTParams]):
    halves = True

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        p = self.params
        if "vectors" not in prepared:
            return super().loss(net, params, buffers, batch, prepared)
        vectors, present = prepared["vectors"], prepared["present"]
        features = net.features(params, buffers, batch.x)
        loss = each(net.classify(params, buffers, features), batch.y)
        if p.kappa:
            loss = loss + p.kappa * contrast(features, batch.y, vectors, present, p.temperature)
        if p.eta:
            attention = functional.softmax(cosines(features, vectors, present) / p.temperature, dim=1)
            richer = (1 - p.attention) * features + p.attention * (attention @ vectors)
            loss = loss + p.eta * each(net.classify(params, buffers, richer), batch.y)
        return batch.mean(loss)


class PGCT(FedExg[PGCTParams]):
    """Qi et al., Cross-Training with Prototypical Distillation for Improving the Generalization of Federated Learning.

    Inferred, as only its abstract and its row in FedCT's tables were found: (1) the route is FedExg's random
    permutation; (2) guidance is FedCT's with lambda_f = 0: the prototypes of the client where the model was last, as a
    softmax contrast over cosines; (3) "prototypes as soft attention regularisers" is cross-entropy on
    ``(1 - s) f + s a U`` with attention ``a = softmax(cos(f, u) / temperature)``; (4) one prototype per class, the
    class mean, where the original clusters; (5) weights and temperature are FedCT's, the share s is a half.

    A class without a local prototype is left out of softmax and attention; its examples have no contrast.

    State: the global model. Wire: N_e + 1 models down and up; prototypes (classes x embedding) up and down N_e times.
    """

    Objective = PgctObjective

    def guidance(self, state: FedExgState, slot: int) -> dict[str, Arrays]:
        return dict(state.learners[slot].extras)
