"""FedFusion: every client fuses the features of the model it trains with those of the model it received."""

import copy
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from fedcross.core.errors import ConfigError
from fedcross.strategies import objective
from fedcross.strategies.method import Arrays, Round, Settings, Upload
from fedcross.strategies.objective import Batch, Net, Outcome, Prepared, Tensors, Trained, Visit, as_arrays, as_tensors
from fedcross.strategies.parts.losses import cross_entropy
from fedcross.strategies.parts.single_model import ModelState, SingleModel

EXTRACTOR = "features.extractor."
REFERENCE = "features.reference."
SHARE = "features.fusion.share"
MIB = 2.0**20
CHUNK = 500  # Examples at a time when global features are computed beforehand.


class FedFusionParams(Settings):
    operator: Literal["conv", "multi", "single"] = "conv"
    weighting: Literal["examples", "uniform"] = "examples"
    decay: float = Field(0.9, ge=0, lt=1)
    inference: Literal["previous", "current"] = "previous"
    momentum: Literal["reset", "keep"] = "reset"
    cache_mib: float = Field(1024.0, ge=0)


def extractor(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extractor of `model`, by full name."""
    return {name: one for name, one in model.items() if name.startswith(EXTRACTOR)}


class Concatenate(nn.Conv2d):
    """Operator ``conv``: ``W [E_l(x) ; E_g(x)] + b`` (Eq. 1), 1x1 from 2C to C channels, (batch, C, height, width)."""

    def __init__(self, channels: int) -> None:
        super().__init__(2 * channels, channels, 1)

    def forward(self, local: Tensor, reference: Tensor) -> Tensor:  # type: ignore[override]
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
        share = self.share.view(-1, 1, 1).to(local.dtype)  # with train.precision=bfloat16 the features are narrower
        return torch.lerp(local, reference.to(local.dtype), share)


class FusedFeatures(nn.Sequential):
    """A model's features with the ``fusion`` operator behind the first part, the ``extractor``; parts keep their names.

    Only the network that the server evaluates has the frozen extractor E_g (``reference``), its last part; a client
    copies it from the extractor that it received.
    """

    def forward(self, x: Tensor, reference: Tensor | None = None) -> Tensor:
        """Return embeddings (batch, embedding) of inputs `x`; `reference` is E_g(x), (batch, C, height, width).

        Without it E_g is this network's ``reference``, or the extractor itself.
        """
        parts = dict(self.named_children())
        local, fusion, held = parts.pop("extractor")(x), parts.pop("fusion"), parts.pop("reference", None)
        if reference is None:
            reference = local if held is None else held(x)
        z: Tensor = fusion(local, reference)
        for part in parts.values():
            z = part(z)
        return z


def frozen(net: Net, prepared: Prepared, x: Tensor) -> Tensor:
    """Return E_g(x) of inputs `x`, shape (batch, C, height, width), without gradient."""
    return net.call(EXTRACTOR.rstrip("."), prepared["params"], prepared["buffers"], x, train=False)


class Fusion(objective.Objective[FedFusionParams]):
    """Cross-entropy of ``C(F(E_l(x), E_g(x)))``; E_g is the received extractor, frozen, in evaluation behaviour.

    Without augmentation E_g(x) is computed once per visit for all examples: n * C * height * width * 4 bytes, 12.25 KiB
    an example on MNIST, 16 KiB on CIFAR. Above ``cache_mib``, or with augmentation, it is computed batch by batch.
    """

    by_row = frozenset({"cache"})

    def __init__(self, params: FedFusionParams) -> None:
        super().__init__(params)
        self.keeps = self.assumes_sgd = params.momentum == "keep"

    def prepare(self, visit: Visit) -> Prepared:
        """Freeze the received extractor, compute global features where that is allowed, and take up kept momentum."""
        if self.keeps and visit.state:
            visit.momentum = as_tensors(visit.state, like=visit.y)["momentum"]
        prepared: Prepared = {"params": extractor(visit.params), "buffers": extractor(visit.buffers)}
        count = len(visit.y)
        if not visit.augmented:
            first = frozen(visit.net, prepared, visit.inputs[:1])
            if first.nbytes * count <= self.params.cache_mib * MIB:
                cache = prepared["cache"] = first.new_empty((count, *first.shape[1:]))  # allocated once
                for rows in (slice(start, start + CHUNK) for start in range(0, count, CHUNK)):
                    cache[rows] = frozen(visit.net, prepared, visit.inputs[rows])
        return prepared

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        cached = "cache" in prepared and batch.rows is not None
        reference = prepared["cache"][batch.rows] if cached else frozen(net, prepared, batch.x)
        z = net.call("features", params, buffers, batch.x, reference)
        return cross_entropy(net.classify(params, buffers, z), batch)

    def predict(self, net: Net, params: Tensors, buffers: Tensors, x: Tensor, prepared: Prepared) -> Tensor:
        z = net.call("features", params, buffers, x, frozen(net, prepared, x), train=False)
        return net.classify(params, buffers, z, train=False)

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        cached = prepared["cache"].nbytes / MIB if "cache" in prepared else 0.0
        state = as_arrays({"momentum": cast("Tensor", trained.momentum)}) if self.keeps else None
        return Outcome(state=state, metrics={"cache-mib": cached})


@dataclass
class FedFusionState(ModelState):
    previous: Arrays = field(default_factory=dict)


class FedFusion(SingleModel[FedFusionParams, FedFusionState]):
    """Yao et al., Towards Faster and Better Federated Learning: A Feature Fusion Approach, ICIP 2019.

    A client gets G = (E, F, C), keeps a frozen copy E_g of E, and trains E_l, F and C on
    ``CE(C(F(E_l(x), E_g(x))), y)``. E is everything up to the second convolution block's pool. The server averages all
    three; then ``lambda <- decay * lambda_before + (1 - decay) * lambda_averaged`` for ``multi`` and ``single``.

    State: G and the extractor of the round before. Clients keep none, or their momentum buffer. Wire: M + |F| each way,
    |F| = 8,256 (conv, 64 channels), 64 (multi), 1 (single) weights. E_g is G's own E and is not sent.
    Deviations: the paper weights clients by examples (default), the code averages uniformly (``weighting``). lambda and
    its average start at 0, so the lambda sent last is the average so far. The code infers with the new E and the
    *previous* round's E_g, which clients held frozen (``inference=previous``, in ``model.safetensors`` as
    ``features.reference``); ``current`` uses the new E for both. The code keeps each client's momentum between visits,
    the paper is silent (``momentum``). The paper caches global features (``cache_mib``); the code cannot, because of
    its random crops. Batch normalisation in E_g uses the received statistics, unchanged.
    """

    Objective = Fusion

    def network(self, model: nn.Module, deployed: bool = False) -> nn.Module:
        """Return `model` with the fusion operator behind its extractor; deployed also with room for E_g."""
        if deployed and self.params.inference == "previous":
            model = copy.deepcopy(model)
            features = model.get_submodule("features")
            features.add_module("reference", copy.deepcopy(features.get_submodule("extractor")))
        if deployed:
            return model
        channels = int(getattr(model, "extractor_channels", 0))
        if channels < 1:
            raise ConfigError(
                "method=fedfusion fuses feature maps after the second convolution block, and this model marks none "
                "(extractor_channels=0). Choose model=fedfusion_cifar, fedfusion_mnist, lenet5 or cnn_femnist."
            )
        name = self.params.operator
        fusion = Concatenate(channels) if name == "conv" else Blend(channels if name == "multi" else 1)
        first, *rest = model.get_submodule("features").named_children()
        fused = FusedFeatures(OrderedDict([first, ("fusion", fusion), *rest]))
        return nn.Sequential(OrderedDict(features=fused, classifier=model.get_submodule("classifier")))

    def step(self, state: FedFusionState, round: Round, uploads: list[Upload], sent: Arrays) -> dict[str, float]:
        state.previous, before = extractor(sent), sent.get(SHARE)
        metrics = {"cache_mib": max(upload.metrics.get("cache-mib", 0.0) for upload in uploads)}
        if before is not None:
            old, new = before.astype(np.float64), state.model[SHARE].astype(np.float64)
            share = self.params.decay * old + (1.0 - self.params.decay) * new
            state.model[SHARE] = share.astype(before.dtype)
            metrics |= {"lambda_mean": float(share.mean()), "lambda_spread": float(share.std())}
        return metrics

    def global_model(self, state: FedFusionState) -> Arrays:
        previous = state.previous or extractor(state.model) if self.params.inference == "previous" else {}
        return state.model | {name.replace(EXTRACTOR, REFERENCE): a for name, a in previous.items()}
