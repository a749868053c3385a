"""Cross-training: within a round models train at their home clients, then at other clients, and are then averaged.

A round has 1 + N_e exchanges. Exchange 0 is FedAvg's: each client trains the global model on its own data (phase I); it
is the *home* of the model that comes out. In exchanges 1 to N_e the server sends each model to another client, its
*host*, which trains it further (phases II and III). At the end of the round the server averages the models (phase IV).
The method decides which client is the host of which model; this module holds what all such methods share.
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
from fedcross.strategies.defence.rules import Judgement, shortened
from fedcross.strategies.parts import matching
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.objective import Objective, Outcome, Prepared, Trained, Visit, as_arrays, as_tensors
from fedcross.strategies.parts.prototypes import class_means
from fedcross.strategies.pool.layout import Arrays
from fedcross.strategies.round.single_model import SingleModel
from fedcross.strategies.wire.protocol import GLOBAL, Payload, Round, Upload
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
        """Return the prototypes that a group of extra arrays holds; absent ones are zero, whatever was sent."""
        vectors, present = group["vectors"], group["present"]
        return cls(np.where(present[:, None], vectors, vectors.dtype.type(0)), present)

    def group(self) -> Arrays:
        """Return these prototypes as a group of extra arrays."""
        return {"vectors": self.vectors, "present": self.present}


@dataclass
class Learner:
    """One of the round's models: its arrays, its weight in the mean, its last client, the prototypes from there."""

    arrays: Arrays
    weight: float
    client: int
    prototypes: Prototypes | None = None


def average(prototypes: list[Prototypes]) -> Prototypes:
    """Return each class's unweighted mean over the clients that hold it (FedCT Eq. 2); others count as absent."""
    holders = np.sum([p.present for p in prototypes], axis=0)
    total = np.sum([np.where(p.present[:, None], p.vectors, 0) for p in prototypes], axis=0, dtype=np.float64)
    vectors = (total / np.maximum(holders, 1)[:, None]).astype(prototypes[0].vectors.dtype)
    return Prototypes(vectors, holders > 0)


def fuse(overall: Prototypes, local: Prototypes, share: float) -> Prototypes:
    """Return ``share U_g + (1 - share) U_l`` per class; a class that only one of the two has comes from that one."""
    both = (overall.present & local.present)[:, None]
    one = np.where(local.present[:, None], local.vectors, overall.vectors)
    mixed = np.where(both, share * overall.vectors + (1 - share) * local.vectors, one)
    present = overall.present | local.present
    vectors = np.where(present[:, None], mixed, 0).astype(local.vectors.dtype)
    return Prototypes(vectors, present)


def _longest(prototypes: Prototypes) -> float:
    """Return the length of the longest prototype; absent ones do not count."""
    held = prototypes.vectors[prototypes.present].astype(np.float64)
    return float(np.linalg.norm(held, axis=1).max(initial=0.0))


class CrossTrainingParams(Settings):
    """Number N_e of exchanges after phase I, epochs and learning rate at a host, and whose examples weight a model.

    ``host_lr`` is this project's: the papers train at a host as at home. It decays as ``train.lr`` does.
    """

    exchanges: int = Field(1, ge=1, description="N_e, how often each model is sent to another client in a round")
    host_epochs: int | None = Field(None, ge=1, description="local epochs at a host; train.epochs if unset")
    host_lr: float | None = Field(None, gt=0, description="learning rate at a host in round 1; train.lr if unset")
    weight: Literal["home", "host"] = Field("home", description="client whose number of examples weights a model")


#: The parameters of one of these methods.
X = TypeVar("X", bound=CrossTrainingParams, default=CrossTrainingParams)


class CrossObjective(Objective[X]):
    """Cross-entropy; the client also sends prototypes of the trained model if the server asks for them."""

    def prepare(self, visit: Visit) -> Prepared:
        """Return an empty dictionary at home; at a host a marker, and the prototypes if the server sent them.

        Keys: ``host`` (); ``vectors`` (classes, embedding) and ``present`` (classes,).
        """
        if visit.exchange == 0:
            return {}
        group = as_tensors(dict(visit.extras.get(GROUP, {})), visit.y)
        return {"host": torch.ones((), device=visit.y.device), **group}

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        """Return the trained model's mean embedding of each class, on the client's own data without augmentation."""
        if not visit.config.get(GROUP, False):
            return Outcome()
        means, present = class_means(visit.net, trained.params, trained.buffers, visit.inputs, visit.y, visit.classes)
        return Outcome({GROUP: as_arrays({"vectors": means, "present": present})})


class CrossTraining(SingleModel[X]):
    """Base of methods that send models from client to client; without overrides the route is random.

    State: the global model between rounds; within a round also its models. Wire per participant: N_e + 1 models down
    and N_e + 1 up, and prototypes where the method uses them.

    Decisions where the papers are silent: only clients whose phase I upload was accepted take part in the exchanges. A
    model's weight in the mean is n_k of its home; with ``weight=host`` it is n_k of its last host, which matters at
    strong skew. If a host fails, its model keeps its last accepted weights, client and prototypes, and still counts in
    the mean. With fewer than two models nothing is exchanged; with two, the models swap clients.
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
        """Return each model's next host, slot -> client: a random permutation in which every model moves."""
        slots, clients, stay = self.places(current)
        hosts = matching.random(stay, stream(current.seed, "route", current.number, current.exchange))
        return {slot: clients[column] for slot, column in zip(slots, hosts)}

    def guidance(self, slot: int) -> dict[str, Arrays]:
        """Return the extra arrays that the server sends with model `slot`."""
        return {}

    # ---- the round -------------------------------------------------------------------------------------------

    def setup(self, arrays: Arrays) -> None:
        """Keep the initial model; check that it ends in a linear classifier if the method uses prototypes."""
        super().setup(arrays)
        if self.uses_prototypes and WEIGHT not in arrays:
            raise ConfigError(f"method {type(self).__name__}: needs a model with {WEIGHT}. Choose one of conf/model.")

    def dispatch(self, current: Round) -> list[Payload]:
        """Send the global model to all clients in exchange 0, later each model to its next host."""
        if current.exchange == 0:
            self.learners, self.latest = {}, {}
            settings = self._settings(current)
            return [
                Payload(c, slot, self.model, config=settings, stream=GLOBAL) for slot, c in enumerate(current.clients)
            ]
        if len(self.learners) < 2:
            return []
        hosts = self.route(current)
        settings = self._settings(current)
        return [
            Payload(hosts[slot], slot, learner.arrays, self.guidance(slot), settings)
            for slot, learner in sorted(self.learners.items())
        ]

    def upload_extras(self, payload: Payload) -> Mapping[str, Spec]:
        """Expect prototypes of the classifier's shape if a later exchange uses them."""
        if not payload.config.get(GROUP, False):
            return {}
        shape, dtype = self.spec[WEIGHT]
        return {GROUP: {"vectors": (shape, dtype), "present": (shape[:1], "bool")}}

    @classmethod
    def reveals(cls, params: X) -> bool:
        """Return whether clients send prototypes with these settings."""
        own = cls.upload_extras is not CrossTraining.upload_extras
        return own or cls(params).uses_prototypes

    def judge_extras(self, uploads: list[Upload]) -> Judgement:
        """Return the uploads with prototypes of at most ``defence.weight`` times the usual length."""
        if not uploads or GROUP not in uploads[0].extras:
            return super().judge_extras(uploads)
        lengths = [_longest(Prototypes.of(upload.extras[GROUP])) for upload in uploads]
        return shortened(uploads, GROUP, "vectors", lengths, self.federation.defence.weight)

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Store the trained models; after the last exchange average them, weighted as ``weight`` says."""
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
        # With literal matching several models may train at one host: its prototypes are then the mean of theirs.
        self.latest |= {client: one[0] if len(one) == 1 else average(one) for client, one in met.items()}
        if current.exchange + 1 == self.exchanges and self.learners:
            learners = [self.learners[slot] for slot in sorted(self.learners)]
            self.model = weighted_mean([one.arrays for one in learners], [one.weight for one in learners])
            self.learners, self.latest = {}, {}
        return {}

    def places(self, current: Round) -> tuple[list[int], list[int], NDArray[np.bool_]]:
        """Return the slots of the models, the participating clients (as many), and each model's present client.

        The last is a bool array (models, clients), True where the model was trained last.
        """
        slots = sorted(self.learners)
        clients = [current.clients[slot] for slot in slots]
        stay = np.array([[self.learners[slot].client == client for client in clients] for slot in slots], dtype=bool)
        return slots, clients, stay

    def _settings(self, current: Round) -> dict[str, float | bool]:
        settings: dict[str, float | bool] = {}
        if self.uses_prototypes and current.exchange + 1 < self.exchanges:
            settings[GROUP] = True
        if current.exchange and self.params.host_epochs is not None:
            settings["epochs"] = self.params.host_epochs
        if current.exchange and self.params.host_lr is not None:
            settings["lr"] = self.params.host_lr
        return settings
