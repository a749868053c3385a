"""PGCT: random exchange of models; training at a host uses the prototypes that the model had at its last client."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedcross.strategies.objective import Batch, Net, Prepared, Tensors
from fedcross.strategies.parts.cross_training import (
    GROUP,
    CrossObjective,
    CrossState,
    CrossTraining,
    CrossTrainingParams,
)
from fedcross.strategies.parts.prototypes import attend, contrast
from fedcross.strategies.pool.pool import Arrays


class PGCTParams(CrossTrainingParams):
    """Weights of the two terms, temperature (cosines are divided by it), share of the attended prototypes."""

    kappa: float = Field(1.0, ge=0, description="weight of the contrast with local prototypes")
    eta: float = Field(0.1, ge=0, description="weight of the cross-entropy of attended embeddings")
    temperature: float = Field(0.5, gt=0)
    attention: float = Field(0.5, ge=0, le=1, description="share s of prototypes in an attended embedding")

    @property
    def uses_prototypes(self) -> bool:
        """Whether the loss needs them."""
        return self.kappa > 0 or self.eta > 0


class PgctObjective(CrossObjective[PGCTParams]):
    """At a host ``CE + kappa C + eta A``; at home CE."""

    halves = True

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        """Return the loss.

        C is ``-log softmax_y(cos(f, u) / temperature)``, 0 for an example whose class has no prototype; A is the
        cross-entropy of the attended embedding.
        """
        p = self.params
        if "vectors" not in prepared:
            return super().loss(net, params, buffers, batch, prepared)
        vectors, present = prepared["vectors"], prepared["present"]
        features = net.features(params, buffers, batch.x)
        loss = functional.cross_entropy(net.classify(params, buffers, features), batch.y, reduction="none")
        if p.kappa:
            loss = loss + p.kappa * contrast(features, batch.y, vectors, present, p.temperature)
        if p.eta:
            richer = attend(features, vectors, present, p.temperature, p.attention)
            scores = net.classify(params, buffers, richer)
            loss = loss + p.eta * functional.cross_entropy(scores, batch.y, reduction="none")
        return batch.mean(loss)


class PGCT(CrossTraining[PGCTParams]):
    """Qi et al., Cross-Training with Prototypical Distillation for Improving the Generalization of Federated Learning.

    Inferred, as only its abstract and its row in FedCT's tables were found: (1) the route is FedExg's random
    permutation; (2) guidance is the local view alone, FedCT's with lambda_f = 0: the prototypes of the client where
    the model was last, as a softmax contrast over cosines; (3) "prototypes as soft attention regularisers" is read as
    cross-entropy on ``(1 - s) f + s a U`` with attention ``a = softmax(cos(f, u) / temperature)``. (4) The original
    finds several prototypes per client by clustering; here it is one per class, the class mean. (5) Weights and
    temperature are FedCT's, the share s is a half.

    A class without a local prototype is left out of softmax and attention; its examples have no contrast.

    State: the global model. Wire: N_e + 1 models down and up; prototypes (classes x embedding) up and down N_e times.
    """

    Objective = PgctObjective

    def guidance(self, state: CrossState, slot: int) -> dict[str, Arrays]:
        """Send the prototypes that the model had at its last client."""
        found = state.learners[slot].prototypes
        return {} if found is None else {GROUP: found.group()}
