"""MOON: clients pull their embeddings towards the global model's and away from their own previous model's."""

from collections import OrderedDict
from typing import Any, cast

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedcross.core.errors import ConfigError
from fedcross.core.settings import Settings
from fedcross.strategies import objective
from fedcross.strategies.objective import Batch, Net, Outcome, Prepared, Tensors, Trained, Visit, as_arrays, as_tensors
from fedcross.strategies.parts.losses import embedded
from fedcross.strategies.parts.single_model import SingleModel
from fedcross.tasks.models._split import Split


class Projected(Settings):
    """Settings of a projection head: `projection` adds one, ``embedding -> hidden -> width`` with one ReLU."""

    projection: bool = Field(True, description="put a projection head before the classifier")
    hidden: int | None = Field(512, ge=1, description="width of the head's hidden layer; null: the width of its input")
    width: int = Field(256, ge=1, description="width of the projected embedding, which the classifier reads")


class Unit(nn.Module):
    """Embeddings of unit length."""

    def forward(self, z: Tensor) -> Tensor:
        return functional.normalize(z, dim=1)


def project(model: nn.Module, params: Projected, method: str, unit: bool = False) -> nn.Module:
    """Return `model` with the head of `params` at the end of its features and a new classifier behind it.

    The head is part of ``features``, so "embedding" means the projected one everywhere. Weights added to a model with
    e features and c classes: ``e*hidden + hidden + hidden*width + width``; the classifier becomes ``width*c + c``.
    With `unit` the features end in unit vectors, with or without a head.
    """
    old = cast(Any, model)
    parts, classifier = OrderedDict(encoder=old.features), old.classifier
    known = hasattr(old, "embedding") and isinstance(old.classifier, nn.Linear)
    if (params.projection or unit) and not known:
        raise ConfigError(
            f"method {method}: its head needs a model with an attribute embedding, its features' width, and an "
            f"nn.Linear as classifier, unlike {type(model).__name__}. See docs/own-model.md."
        )
    if params.projection:
        hidden = old.embedding if params.hidden is None else params.hidden
        parts["head"] = nn.Sequential(nn.Linear(old.embedding, hidden), nn.ReLU(), nn.Linear(hidden, params.width))
        classifier = nn.Linear(params.width, old.classifier.out_features)
    if unit:
        parts["unit"] = Unit()
    return Split(nn.Sequential(parts), classifier) if len(parts) > 1 else model


class MoonParams(Projected):
    mu: float = Field(1.0, ge=0)
    tau: float = Field(0.5, gt=0)


class Contrast(objective.Objective[MoonParams]):
    keeps = True
    halves = True

    def prepare(self, visit: Visit) -> Prepared:
        """Return the received model and the one that this client trained last; ``met`` is 0 if there is none."""
        kept = as_tensors(visit.state, like=visit.y)
        previous = tuple({n: kept.get(n, own) for n, own in part.items()} for part in (visit.params, visit.buffers))
        met = next(iter(visit.params.values())).new_tensor(float(bool(kept)))
        return {"global": (visit.params, visit.buffers), "previous": previous, "met": met}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        z, loss = embedded(net, params, buffers, batch)
        if not self.params.mu:
            return loss
        near, far = (
            functional.cosine_similarity(z, net.features(p, b, batch.x, train=False), dim=1)
            for p, b in (prepared["global"], prepared["previous"])
        )
        contrast = functional.softplus((far - near) / self.params.tau)  # -log(e^a / (e^a + e^b)) = log(1 + e^(b - a))
        met: Tensor = prepared["met"]
        return loss + self.params.mu * met * batch.mean(contrast)

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        return Outcome(state=as_arrays({**trained.params, **trained.buffers}))


class Moon(SingleModel[MoonParams]):
    """Li, He and Song, Model-Contrastive Federated Learning, CVPR 2021.

    Client k minimises ``CE - mu log(e^(s_G/tau) / (e^(s_G/tau) + e^(s_P/tau)))``; s_G and s_P are the cosines between
    the projected embedding of the model in training and those of the received model G and of the model P that the
    client trained at its last visit. The server averages as FedAvg does, by examples.

    State: the global model, with a projection head ``embedding -> 512 -> 256`` before the classifier, as published;
    each client keeps the model of its last accepted visit. Wire: FedAvg's, with that head.
    Deviations: the first layer of the head in the authors' code (QinbinLi/MOON) is as wide as its input
    (`hidden=null`). At a client's first visit the term is 0; the authors contrast with a random network there. G and P
    run in evaluation behaviour.
    """

    Objective = Contrast

    def network(self, model: nn.Module, deployed: bool = False) -> nn.Module:
        return model if deployed else project(model, self.params, type(self).__name__)
