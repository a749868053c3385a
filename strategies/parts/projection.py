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

    Without it the method contrasts the model's own embeddings, and its network is the same as that of other methods.

    The codes of MOON's and FedProc's authors (``model.py`` of QinbinLi/MOON and MuXutong/FedProc) make the first layer
    as wide as its input, which is ``hidden=null``. For ResNet-18 (512) that is the default here; LeNet-5 has 84-84-256
    there and 84-512-256 here: 92,626 weights with head and new classifier (10 classes) in place of 238,574.
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
    With `unit` the features end in unit vectors, with or without a head, and the classifier reads these. `method` is
    whose head it is, for the error.

    Raises
    ------
    ConfigError
        If the network changes and the model does not say how wide its embedding and its scores are.
    """
    old = cast(Any, model)
    parts, classifier = OrderedDict(encoder=old.features), old.classifier
    if params.projection or unit:
        _check(model, method)
    if params.projection:
        hidden = old.embedding if params.hidden is None else params.hidden
        parts["head"] = nn.Sequential(nn.Linear(old.embedding, hidden), nn.ReLU(), nn.Linear(hidden, params.width))
        classifier = nn.Linear(params.width, old.classifier.out_features)
    if unit:
        parts["unit"] = Unit()
    return Split(nn.Sequential(parts), classifier) if len(parts) > 1 else model


def _check(model: nn.Module, method: str) -> None:
    """Raise a ConfigError unless the widths of the model's embedding and of its classifier are known."""
    classifier, lacks = model.get_submodule("classifier"), []
    if not all(isinstance(getattr(classifier, name, None), int) for name in ("in_features", "out_features")):
        lacks.append(f"as classifier a {type(classifier).__name__}, not an nn.Linear")
    if not isinstance(getattr(model, "embedding", None), int):
        lacks.append("no attribute embedding, the width of its features")
    if lacks:
        raise ConfigError(
            f"method {method}: its projection head needs a model with a linear classifier, {type(model).__name__} has "
            f"{' and '.join(lacks)}. Choose another model, or write it as docs/own-model.md shows; with "
            "method.projection=false MOON takes any classifier."
        )
