"""Fusion of two feature maps, and networks with a fusion operator behind their extractor (FedFusion)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


class Concatenate(nn.Conv2d):
    """Operator ``conv``: ``W [E_l(x) ; E_g(x)] + b``, a 1x1 convolution from 2C to C channels (Eq. 1 of the paper).

    Weights: 2C * C + C, 8,256 for C = 64. The paper's figure joins (global, local): the same family of functions.
    """

    def __init__(self, channels: int) -> None:
        super().__init__(2 * channels, channels, 1)

    def forward(self, local: Tensor, reference: Tensor) -> Tensor:  # type: ignore[override]
        """Return fused features; all three are (batch, C, height, width)."""
        return super().forward(torch.cat((local, reference), dim=1))


class Blend(nn.Module):
    """Operators ``multi`` and ``single``: ``lambda E_g(x) + (1 - lambda) E_l(x)`` (Eq. 2 and 3).

    One lambda per channel (``multi``), or one (``single``): `shares` is their number. lambda starts at 0, has no bounds
    and is decayed as any weight. At 0 the result is E_l(x) to the bit.
    """

    def __init__(self, shares: int) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.zeros(shares))

    def forward(self, local: Tensor, reference: Tensor) -> Tensor:
        """Return fused features; all three are (batch, C, height, width)."""
        share = self.share.view(-1, 1, 1).to(local.dtype)  # with train.precision=bfloat16 the features are narrower
        return torch.lerp(local, reference.to(local.dtype), share)


def operator(name: str, channels: int) -> nn.Module:
    """Return the fusion operator `name` (``conv``, ``multi`` or ``single``) for features of `channels` channels."""
    return Concatenate(channels) if name == "conv" else Blend(channels if name == "multi" else 1)


class FusedFeatures(nn.Module):
    """A model's features with a fusion operator behind the first part, the ``extractor``; parts keep their names.

    Only the network that the server evaluates has the frozen extractor E_g (``reference``); a client copies it from the
    extractor that it received.
    """

    def __init__(self, features: nn.Module, fusion: nn.Module) -> None:
        super().__init__()
        for name, part in features.named_children():
            self.add_module(name, part)
            if name == "extractor":
                self.fusion = fusion
        self.reference: nn.Module | None = None

    def forward(self, x: Tensor, reference: Tensor | None = None) -> Tensor:
        """Return embeddings (batch, embedding) of inputs `x`; `reference` is E_g(x), (batch, C, height, width).

        Without it E_g is this network's ``reference``, or the extractor itself.
        """
        local = self.get_submodule("extractor")(x)
        if reference is None:
            reference = local if self.reference is None else self.reference(x)
        z = self.fusion(local, reference)
        for name, part in self.named_children():
            if name not in ("extractor", "fusion", "reference"):
                z = part(z)
        return cast("Tensor", z)


class FusedModel(nn.Module):
    """``classifier(features(x, reference))`` with the halves, names and attributes of the configured model."""

    def __init__(self, model: nn.Module, fusion: nn.Module) -> None:
        super().__init__()
        self.features = FusedFeatures(model.get_submodule("features"), fusion)
        self.classifier = model.get_submodule("classifier")
        self.embedding = int(getattr(model, "embedding", 0))
        self.extractor_channels = int(getattr(model, "extractor_channels", 0))

    def forward(self, x: Tensor, reference: Tensor | None = None) -> Tensor:
        """Return class scores, shape (batch, classes); `reference` as in :class:`FusedFeatures`."""
        return cast("Tensor", self.classifier(self.features(x, reference)))
