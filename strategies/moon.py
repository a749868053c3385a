"""MOON: clients pull their embeddings towards the global model's and away from their own previous model's."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedcross.strategies.objective import (
    Batch,
    Net,
    Objective,
    Outcome,
    Prepared,
    Tensors,
    Trained,
    Visit,
    as_arrays,
    as_tensors,
)
from fedcross.strategies.parts.projection import Projected, project
from fedcross.strategies.parts.single_model import SingleModel


class MoonParams(Projected):
    """``mu``: weight of the contrast, 0 or more (0 is FedAvg on the same network); ``tau``: its temperature."""

    mu: float = Field(1.0, ge=0)
    tau: float = Field(0.5, gt=0)


class Contrast(Objective[MoonParams]):
    """Cross-entropy + mu times the model-contrastive term."""

    keeps = True
    halves = True

    def prepare(self, visit: Visit) -> Prepared:
        """Return the received model and the one this client trained last; ``met`` is 0 if there is none yet."""
        kept = as_tensors(visit.state, like=visit.y)
        params = {name: kept.get(name, received) for name, received in visit.params.items()}
        buffers = {name: kept.get(name, received) for name, received in visit.buffers.items()}
        like = next(iter(visit.params.values()))
        return {
            "global": (visit.params, visit.buffers),
            "previous": (params, buffers),
            "met": torch.tensor(1.0 if kept else 0.0, dtype=like.dtype, device=like.device),
        }

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        """Return the scalar loss of one batch."""
        own = self.params
        z = net.features(params, buffers, batch.x)
        scores = net.classify(params, buffers, z)
        loss = batch.mean(functional.cross_entropy(scores, batch.y, reduction="none"))
        if not own.mu:
            return loss
        near, far = (
            functional.cosine_similarity(z, net.features(params, buffers, batch.x, train=False), dim=1)
            for params, buffers in (prepared["global"], prepared["previous"])
        )
        contrast = functional.softplus((far - near) / own.tau)  # -log(e^a / (e^a + e^b)) = log(1 + e^(b - a))
        met: Tensor = prepared["met"]
        return loss + own.mu * met * batch.mean(contrast)

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        """Keep the whole trained model for the next visit."""
        return Outcome(state=as_arrays({**trained.params, **trained.buffers}))


class Moon(SingleModel[MoonParams]):
    """Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021.

    Client k minimises ``CE - mu log(e^(s_G/tau) / (e^(s_G/tau) + e^(s_P/tau)))``; s_G and s_P are the cosines between
    the projected embedding of the model in training and those of the received model G and of the model P that the
    client trained at its last visit. The server averages as FedAvg does, by examples.

    Network: a projection head before the classifier, ``embedding -> 512 -> 256`` as published, so the model is larger
    than FedAvg's; ``projection=false`` contrasts the model's own embeddings and leaves the network as it is.

    State: the global model; each client keeps its last local model (one model on its disk, from its last accepted
    visit). Wire: one model down, one up.

    The authors' head has a first layer as wide as its input (`hidden=null`, see :class:`Projected`). At a client's
    first visit their code contrasts with that client's own random initial network; here there is no negative then and
    the term is 0. That is one visit for each client: 10 of 1,000 in FedCT's federation (10 clients, 100 rounds), at
    most 100 of 20,000 in FedCross's (100 clients, 10 of them in each of 2,000 rounds). On the digits (20 clients, 10 of
    them a round, beta .5, 60 rounds, rate .05, three seeds) the mean accuracy of the last ten rounds is 94.3 % by
    default, 94.2 with such a network at the first visits (20 of 600), and 93.7 with `hidden=null`; that of the last
    round is 95.3, 95.7 and 94.9.

    Deviations: G and P run in evaluation behaviour (their own batch-normalisation statistics). A client without a
    previous model has no negative, so the term is 0 at its first visit. A client that was not drawn for many rounds
    still uses its old P, as in the authors' code.
    """

    Objective = Contrast

    def network(self, model: nn.Module, deployed: bool = False) -> nn.Module:
        """Return `model` with the projection head."""
        return model if deployed else project(model, self.params, type(self).__name__)
