"""Cross-training, written once: models train at home, travel to other clients, train there, and only then are averaged.

A round has 1 + N_e exchanges. Exchange 0 is FedAvg's: everyone trains the global model on its own data (phase I). In
exchanges 1 to N_e each model is sent to another client and trains on (phases II and III). At the end of the round the
models are averaged (phase IV). Which client a model meets is the method's routing; everything else is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypeVar

from fedcross.core.errors import ConfigError
from fedcross.core.randomness import stream
from fedcross.core.settings import Settings
from fedcross.strategies.parts import matching
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.objective import Objective, Outcome, Prepared, Trained, Visit, as_arrays, as_tensors
from fedcross.strategies.parts.prototypes import class_means
from fedcross.strategies.pool.layout import Arrays
from fedcross.strategies.round.single_model import SingleModel
from fedcross.strategies.wire.protocol import Payload, Round, Upload
from fedcross.strategies.wire.records import Spec

#: Name of the extra group that carries prototypes, both ways: ``vectors`` and ``present``.
GROUP = "prototypes"
#: The classifier's entries in a model (every model of ``tasks.models`` ends with a linear ``classifier``).
WEIGHT, BIAS = "classifier.weight", "classifier.bias"


@dataclass(frozen=True)
class Prototypes:
    """One vector per class, float (classes, embedding), and which classes have one, bool (classes,)."""

    vectors: NDArray[np.floating]
    present: NDArray[np.bool_]

    @classmethod
    def of(cls, group: Mapping[str, NDArray[Any]]) -> Prototypes:
        """Return what a group of extras holds."""
        return cls(group["vectors"], group["present"])

    def group(self) -> Arrays:
        """Return the group of extras that carries these prototypes."""
        return {"vectors": self.vectors, "present": self.present}


@dataclass
class Learner:
    """One travelling model: its arrays, its weight in the mean, the client where it is, its prototypes there."""

    arrays: Arrays
    weight: float
    client: int
    prototypes: Prototypes | None = None


def average(prototypes: list[Prototypes]) -> Prototypes:
    """Return the plain mean per class over the clients that hold it (FedCT Eq. 2); classes nobody holds are absent."""
    holders = np.sum([p.present for p in prototypes], axis=0)
    total = np.sum([np.where(p.present[:, None], p.vectors, 0) for p in prototypes], axis=0, dtype=np.float64)
    vectors = (total / np.maximum(holders, 1)[:, None]).astype(prototypes[0].vectors.dtype)
    return Prototypes(vectors, holders > 0)


def fuse(overall: Prototypes, local: Prototypes, share: float) -> Prototypes:
    """Return ``share U_g + (1 - share) U_l`` per class; a class that only one of them has is taken from it."""
    both = (overall.present & local.present)[:, None]
    one = np.where(local.present[:, None], local.vectors, overall.vectors)
    mixed = np.where(both, share * overall.vectors + (1 - share) * local.vectors, one)
    present = overall.present | local.present
    vectors = np.where(present[:, None], mixed, 0).astype(local.vectors.dtype)
    return Prototypes(vectors, present)


class CrossTrainingParams(Settings):
    """Exchanges N_e after phase I, the local epochs of each, and whose examples weigh a model in the mean."""

    exchanges: int = Field(1, ge=1, description="N_e, times each model is sent to another client in a round")
    host_epochs: int | None = Field(None, ge=1, description="local epochs at a host; train.epochs if unset")
    weight: Literal["home", "host"] = Field("home", description="whose number of examples weighs a model")


#: The parameters of one of these methods.
X = TypeVar("X", bound=CrossTrainingParams, default=CrossTrainingParams)


class CrossObjective(Objective[X]):
    """Cross-entropy, and prototypes of the trained model where the server asks for them."""

    def prepare(self, visit: Visit) -> Prepared:
        """Return nothing at home; at a host a mark, and the prototypes that came along.

        ``host`` (); ``vectors`` (classes, embedding) and ``present`` (classes,) if the server sent them.
        """
        if visit.exchange == 0:
            return {}
        group = as_tensors(dict(visit.extras.get(GROUP, {})), visit.x)
        return {"host": torch.ones((), device=visit.x.device), **group}

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        """Return the trained model's mean embedding of each class, on the client's own data without augmentation."""
        if not visit.config.get(GROUP, False):
            return Outcome()
        means, present = class_means(visit.net, trained.params, trained.buffers, visit.x, visit.y, visit.classes)
        return Outcome({GROUP: as_arrays({"vectors": means, "present": present})})


class CrossTraining(SingleModel[X]):
    """Base of methods that route models between clients; on its own a random route without anything else.

    State: the global model, between rounds; within a round the travelling models. Wire per participant: N_e + 1 models
    down and N_e + 1 up, and prototypes where the method uses them.

    Decisions where the papers are silent: only clients whose phase I upload was accepted take part in the exchanges. A
    model weighs n_k of its home in the mean; with ``weight=host`` n_k of its last host, which matters at strong skew. A
    model whose host is lost keeps its last accepted weights, place and prototypes, and counts in the mean. With fewer
    than two models there is nothing to exchange; with two they swap.
    """

    Objective = CrossObjective
    #: A model's home and hosts are part of the method.
    interchangeable = False

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        self.exchanges = 1 + (self.params.exchanges if self.federation.clients_per_round > 1 else 0)
        self.learners: dict[int, Learner] = {}
        self.latest: dict[int, Prototypes] = {}

    # ---- what a method may change ----------------------------------------------------------------------------

    @property
    def uses_prototypes(self) -> bool:
        """Whether clients must send prototypes."""
        return False

    def route(self, current: Round) -> dict[int, int]:
        """Return the host of each model, slot -> client: a random permutation in which every model moves."""
        slots, clients, stay = self.places(current)
        hosts = matching.random(stay, stream(current.seed, "route", current.number, current.exchange))
        return {slot: clients[column] for slot, column in zip(slots, hosts)}

    def guidance(self, slot: int) -> dict[str, Arrays]:
        """Return the extras that travel with model `slot`."""
        return {}

    # ---- the round -------------------------------------------------------------------------------------------

    def setup(self, arrays: Arrays) -> None:
        """Keep the initial model; prototypes need a model that ends in a linear classifier."""
        super().setup(arrays)
        if self.uses_prototypes and WEIGHT not in arrays:
            raise ConfigError(f"method {type(self).__name__}: needs a model with {WEIGHT}. Choose one of conf/model.")

    def dispatch(self, current: Round) -> list[Payload]:
        """Send the global model to everyone first, then each model to its next host."""
        if current.exchange == 0:
            self.learners, self.latest = {}, {}
            settings = self._settings(current)
            return [Payload(c, slot, self.model, config=settings) for slot, c in enumerate(current.clients)]
        if len(self.learners) < 2:
            return []
        hosts = self.route(current)
        settings = self._settings(current)
        return [
            Payload(hosts[slot], slot, learner.arrays, self.guidance(slot), settings)
            for slot, learner in sorted(self.learners.items())
        ]

    def upload_extras(self, payload: Payload) -> Mapping[str, Spec]:
        """Ask for prototypes of the classifier's shape where they are used again."""
        if not payload.config.get(GROUP, False):
            return {}
        shape, dtype = self.spec[WEIGHT]
        return {GROUP: {"vectors": (shape, dtype), "present": (shape[:1], "bool")}}

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Take in the trained models; after the last exchange average them, weighted by the examples of their homes."""
        met: dict[int, list[Prototypes]] = {}
        for upload in uploads:
            found = Prototypes.of(upload.extras[GROUP]) if GROUP in upload.extras else None
            if current.exchange == 0:
                self.learners[upload.slot] = Learner(upload.arrays, upload.num_examples, upload.client, found)
            else:
                learner = self.learners[upload.slot]
                learner.arrays, learner.client, learner.prototypes = upload.arrays, upload.client, found
                if self.params.weight == "host":
                    learner.weight = upload.num_examples
            if found is not None:
                met.setdefault(upload.client, []).append(found)
        # A literal route may bring several models to one host: its prototypes are then the mean of theirs.
        self.latest |= {client: one[0] if len(one) == 1 else average(one) for client, one in met.items()}
        if current.exchange + 1 == self.exchanges and self.learners:
            learners = [self.learners[slot] for slot in sorted(self.learners)]
            self.model = weighted_mean([one.arrays for one in learners], [one.weight for one in learners])
            self.learners, self.latest = {}, {}
        return {}

    def places(self, current: Round) -> tuple[list[int], list[int], NDArray[np.bool_]]:
        """Return the models' slots, the clients that take part (of the same number), and where each model is now."""
        slots = sorted(self.learners)
        clients = [current.clients[slot] for slot in slots]
        stay = np.array([[self.learners[slot].client == client for client in clients] for slot in slots], dtype=bool)
        return slots, clients, stay

    def _settings(self, current: Round) -> dict[str, int | bool]:
        settings: dict[str, int | bool] = {}
        if self.uses_prototypes and current.exchange + 1 < self.exchanges:
            settings[GROUP] = True
        if current.exchange and self.params.host_epochs is not None:
            settings["epochs"] = self.params.host_epochs
        return settings
