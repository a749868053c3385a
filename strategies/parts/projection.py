"""A projection head between a model's features and its classifier, for the contrastive methods."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedcross.core.errors import ConfigError
from fedcross.core.settings import Settings
from fedcross.tasks.models._split import Split


class Projected(Settings):
    """Settings of a projection head: `projection` adds one, ``embedding -> hidden -> width`` with one ReLU.

    The codes of MOON's and FedProc's authors (``model.py`` of QinbinLi/MOON and MuXutong/FedProc) make the first layer
    as wide as its input, which is ``hidden=null``: LeNet-5 has 84-84-256 there and 84-512-256 here.
    """

    projection: bool = Field(True, description="put a projection head before the classifier")
    hidden: int | None = Field(512, ge=1, description="width of the head's hidden layer; null: the width of its input")
    width: int = Field(256, ge=1, description="width of the projected embedding, which the classifier reads")


class Unit(nn.Module):
    """Embeddings of unit length."""

    def forward(self, z: Tensor) -> Tensor:
        """Return `z` (batch, width) with every row divided by its Euclidean norm."""
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
