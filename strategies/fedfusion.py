"""FedFusion: every client fuses the features of the model it trains with those of the model it received."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np
from pydantic import Field
from torch import Tensor, nn

from fedcross.core.errors import ConfigError
from fedcross.core.settings import Settings
from fedcross.strategies import objective
from fedcross.strategies.method import Round, Start, Upload
from fedcross.strategies.objective import Batch, Net, Outcome, Prepared, Tensors, Trained, Visit, as_arrays, as_tensors
from fedcross.strategies.parts.fusion import FusedModel, operator
from fedcross.strategies.parts.losses import cross_entropy
from fedcross.strategies.parts.single_model import ModelState, SingleModel
from fedcross.strategies.pool.pool import Arrays

EXTRACTOR = "features.extractor."
REFERENCE = "features.reference."
SHARE = "features.fusion.share"
MIB = 2.0**20
#: Examples at a time when global features are computed beforehand.
CHUNK = 500


class FedFusionParams(Settings):
    """Settings, explained in ``conf/method/fedfusion.yaml``; ``decay`` is of lambda's moving average."""

    operator: Literal["conv", "multi", "single"] = "conv"
    weighting: Literal["examples", "uniform"] = "examples"
    decay: float = Field(0.9, ge=0, lt=1)
    inference: Literal["previous", "current"] = "previous"
    momentum: Literal["reset", "keep"] = "reset"
    cache_mib: float = Field(1024.0, ge=0)


class Fusion(objective.Objective[FedFusionParams]):
    """Cross-entropy of ``C(F(E_l(x), E_g(x)))``; E_g is the received extractor, frozen, in evaluation behaviour.

    Without augmentation E_g(x) is computed once per visit for all examples and looked up afterwards. Memory while the
    client trains: n * C * height * width * 4 bytes, 12.25 KiB an example on MNIST and 16 KiB on CIFAR (30,000 MNIST
    examples: 359 MiB). Above ``cache_mib``, or with augmentation, it is computed batch by batch.
    """

    by_row = frozenset({"cache"})

    def __init__(self, params: FedFusionParams) -> None:
        super().__init__(params)
        self.keeps = self.assumes_sgd = params.momentum == "keep"

    def prepare(self, visit: Visit) -> Prepared:
        """Freeze the received extractor, compute global features where that is allowed, and take up kept momentum."""
        if self.keeps and "momentum" in visit.state:
            visit.momentum = as_tensors({"momentum": visit.state["momentum"]}, like=visit.y)["momentum"]
        prepared: Prepared = {
            "params": {n: p for n, p in visit.params.items() if n.startswith(EXTRACTOR)},
            "buffers": {n: b for n, b in visit.buffers.items() if n.startswith(EXTRACTOR)},
        }
        if not visit.augmented:
            size = frozen(visit.net, prepared, visit.inputs[:1]).nbytes * len(visit.y)
            if size <= self.params.cache_mib * MIB:
                prepared["cache"] = global_features(visit, prepared)
        return prepared

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        """Return the cross-entropy of the fused network."""
        if "cache" in prepared and batch.rows is not None:
            reference = prepared["cache"][batch.rows]
        else:
            reference = frozen(net, prepared, batch.x)
        return cross_entropy(net.call("", params, buffers, batch.x, reference), batch)

    def predict(self, net: Net, params: Tensors, buffers: Tensors, x: Tensor, prepared: Prepared) -> Tensor:
        """Return the client's scores with the E_g it trained with."""
        return net.call("", params, buffers, x, frozen(net, prepared, x), train=False)

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        """Store the momentum buffer if so configured; report the size of the cache."""
        cached = prepared["cache"].nbytes / MIB if "cache" in prepared else 0.0
        state = as_arrays({"momentum": cast("Tensor", trained.momentum)}) if self.keeps else None
        return Outcome(state=state, metrics={"cache-mib": cached})


def frozen(net: Net, prepared: Prepared, x: Tensor) -> Tensor:
    """Return E_g(x) of inputs `x`, shape (batch, C, height, width), without gradient."""
    return net.call(EXTRACTOR.rstrip("."), prepared["params"], prepared["buffers"], x, train=False)


def global_features(visit: Visit, prepared: Prepared) -> Tensor:
    """Return E_g of all of the client's examples, shape (n, C, height, width), allocated once."""
    first = frozen(visit.net, prepared, visit.inputs[:CHUNK])
    features = first.new_empty((len(visit.y), *first.shape[1:]))
    features[: len(first)] = first
    for start in range(CHUNK, len(visit.y), CHUNK):
        features[start : start + CHUNK] = frozen(visit.net, prepared, visit.inputs[start : start + CHUNK])
    return features


@dataclass
class FedFusionState(ModelState):
    """G, and the extractor of the round before."""

    previous: Arrays


class FedFusion(SingleModel[FedFusionParams, FedFusionState]):
    """Yao et al., Towards Faster and Better Federated Learning: A Feature Fusion Approach, ICIP 2019.

    A client gets G = (E, F, C), keeps a frozen copy E_g of E, and trains E_l, F and C on
    ``CE(C(F(E_l(x), E_g(x))), y)``. E is everything up to the second convolution block's pool. The server averages all
    three; then ``lambda <- decay * lambda_before + (1 - decay) * lambda_averaged`` for ``multi`` and ``single``.

    State: G and the extractor of the round before. Clients keep none, or their momentum buffer. Wire: M + |F| each
    way, |F| = 8,256 (conv, 64 channels), 64 (multi), 1 (single) weights. E_g is G's own E and is not sent; the authors'
    state_dict holds it twice.

    Readings and deviations:

    - The paper weights clients by examples (default), the code averages uniformly: ``weighting``.
    - lambda and its moving average (section 3.2 and the code) start at 0, so the lambda sent last is the average so
      far: no shadow copy is needed.
    - The code infers with the new E and the *previous* round's E_g, which clients held frozen: ``inference=previous``
      (default); ``current`` uses the new E for both. ``model.safetensors`` has it as ``features.reference``.
    - The code keeps each client's momentum between visits, the paper is silent: ``momentum``, reset by default.
    - The paper caches global features; the code cannot, because of its random crops: ``cache_mib``.
    - Batch normalisation in E_g (the authors' networks have none) uses the received statistics, unchanged.
    """

    Objective = Fusion

    def network(self, model: nn.Module, deployed: bool = False) -> nn.Module:
        """Return `model` with the fusion operator behind its extractor; deployed also with room for E_g.

        Raises
        ------
        ConfigError
            If the model has no convolution part that ends after its second block.
        """
        if deployed and self.params.inference == "previous":
            model = copy.deepcopy(model)
            features = cast("FusedModel", model).features
            features.reference = copy.deepcopy(features.get_submodule("extractor"))
        if deployed:
            return model
        channels = int(getattr(model, "extractor_channels", 0))
        if channels < 1:
            raise ConfigError(
                "method=fedfusion fuses feature maps after the second convolution block, and this model marks none "
                "(extractor_channels=0). Choose model=fedfusion_cifar, fedfusion_mnist, lenet5 or cnn_femnist."
            )
        return FusedModel(model, operator(self.params.operator, channels))

    def init(self, start: Start) -> FedFusionState:
        """Keep the initial model; before the first round both extractors are its own."""
        model = super().init(start).model
        return FedFusionState(model, extractor(model))

    def aggregate(self, state: FedFusionState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Average, then smooth lambda; the extractor that the clients held frozen becomes the previous one."""
        if not uploads:
            return {}
        state.previous, before = extractor(state.model), state.model.get(SHARE)
        super().aggregate(state, round, uploads)
        metrics = {"cache_mib": max(upload.metrics.get("cache-mib", 0.0) for upload in uploads)}
        if before is not None:
            old, new = before.astype(np.float64), state.model[SHARE].astype(np.float64)
            share = self.params.decay * old + (1.0 - self.params.decay) * new
            state.model[SHARE] = share.astype(before.dtype)
            metrics |= {"lambda_mean": float(share.mean()), "lambda_spread": float(share.std())}
        return metrics

    def global_model(self, state: FedFusionState) -> Arrays:
        """Return the global model, with the extractor of the round before where inference uses that."""
        if self.params.inference == "current":
            return state.model
        return state.model | {REFERENCE + name.removeprefix(EXTRACTOR): a for name, a in state.previous.items()}


def extractor(model: Arrays) -> Arrays:
    """Return the extractor of `model`, by full name."""
    return {name: array for name, array in model.items() if name.startswith(EXTRACTOR)}
