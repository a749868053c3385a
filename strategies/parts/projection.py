"""A projection head between a model's features and its classifier, for the contrastive methods."""

from __future__ import annotations

from typing import Any, cast

from pydantic import Field
from torch import nn

from fedcross.core.settings import Settings
from fedcross.tasks.models._split import Split


class Projected(Settings):
    """Settings of a projection head: `projection` puts one in, ``embedding -> hidden -> width`` with one ReLU.

    Without it the method contrasts the model's own embeddings, and its network is the one of every other method.
    """

    projection: bool = Field(True, description="put a projection head before the classifier")
    hidden: int = Field(512, ge=1, description="width of the head's hidden layer")
    width: int = Field(256, ge=1, description="width of the projected embedding, which the classifier reads")


def project(model: nn.Module, params: Projected) -> nn.Module:
    """Return `model` with the head of `params` at the end of its features and a new classifier behind it.

    The head belongs to ``features``, so whatever reads embeddings reads projected ones. Weights added to a model with
    e features and c classes: ``e*hidden + hidden + hidden*width + width``; the classifier becomes ``width*c + c``.
    """
    if not params.projection:
        return model
    old = cast(Any, model)
    head = nn.Sequential(nn.Linear(old.embedding, params.hidden), nn.ReLU(), nn.Linear(params.hidden, params.width))
    features = nn.Sequential()
    features.add_module("encoder", old.features)
    features.add_module("head", head)
    return Split(features, nn.Linear(params.width, old.classifier.out_features))
