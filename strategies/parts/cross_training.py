"""Cross-training: within a round models train at their home clients, then at other clients, and are then averaged.

A round has 1 + N_e exchanges. Exchange 0 is FedAvg's: each client trains the global model on its own data (phase I); it
is the *home* of the model that comes out. In exchanges 1 to N_e the server sends each model to another client, its
*host*, which trains it further (phases II and III). At the end of the round the server averages the models (phase IV).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypeVar

from fedcross.core.errors import ConfigError
from fedcross.core.randomness import stream
from fedcross.core.settings import Settings
from fedcross.strategies.method import GLOBAL, Round, Scalar, Start, Task, Upload
from fedcross.strategies.objective import Objective, Outcome, Prepared, Trained, Visit, as_arrays, as_tensors
from fedcross.strategies.parts import matching
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.prototypes import class_means
from fedcross.strategies.parts.single_model import ModelState, SingleModel
from fedcross.strategies.pool.pool import Arrays
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
    """Return each class's unweighted mean over the clients that hold it (FedCT Eq. 2)."""
    holders = np.sum([p.present for p in prototypes], axis=0)
    total = np.sum([np.where(p.present[:, None], p.vectors, 0) for p in prototypes], axis=0, dtype=np.float64)
    vectors = (total / np.maximum(holders, 1)[:, None]).astype(prototypes[0].vectors.dtype)
    return Prototypes(vectors, holders > 0)


def fuse(overall: Prototypes, local: Prototypes, share: float) -> Prototypes:
    """Return ``share U_g + (1 - share) U_l`` per class; a class that only one of the two has comes from that one."""
    here, there = local.present[:, None], overall.present[:, None]
    mixed = share * overall.vectors + (1 - share) * local.vectors
    found = np.where(here & there, mixed, np.where(here, local.vectors, np.where(there, overall.vectors, 0)))
    return Prototypes(found.astype(local.vectors.dtype), overall.present | local.present)


class CrossTrainingParams(Settings):
    """Settings. The papers train at a host as at home; ``host_lr`` is this project's and decays as ``train.lr``."""

    exchanges: int = Field(1, ge=1, description="N_e, how often each model is sent to another client in a round")
    host_epochs: int | None = Field(None, ge=1, description="local epochs at a host; train.epochs if unset")
    host_lr: float | None = Field(None, gt=0, description="learning rate at a host in round 1; train.lr if unset")
    weight: Literal["home", "host"] = Field("home", description="client whose number of examples weights a model")

    @property
    def uses_prototypes(self) -> bool:
        """Whether clients must send prototypes."""
        return False


X = TypeVar("X", bound=CrossTrainingParams, default=CrossTrainingParams)


class CrossObjective(Objective[X]):
    """Cross-entropy; the client also sends prototypes of the trained model if the server asks for them."""

    def __init__(self, params: X) -> None:
        super().__init__(params)
        self.sends = self.needs = frozenset({GROUP}) if params.uses_prototypes else frozenset()

    def prepare(self, visit: Visit) -> Prepared:
        """Return nothing at home; at a host ``host`` (), and the ``vectors`` and ``present`` that the server sent."""
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


@dataclass
class CrossState(ModelState):
    """The global model; within a round its models by slot, and client -> the prototypes that it sent last."""

    learners: dict[int, Learner] = field(default_factory=dict)
    latest: dict[int, Prototypes] = field(default_factory=dict)
    shape: tuple[int, ...] = ()  # of the prototypes, (classes, embedding)
    dtype: str = ""
    met: float | None = None


class CrossTraining(SingleModel[X, CrossState]):
    """Base of methods that send models from client to client; without overrides the route is random.

    State: the global model between rounds; within a round also its models. Wire per participant: N_e + 1 models down
    and N_e + 1 up, and prototypes where the method uses them.

    Where the papers are silent: only clients whose phase I upload was accepted take part in the exchanges. A model's
    weight in the mean is n_k of its home or, with ``weight=host``, of its last host. If a host fails, its model stays
    what it was and still counts in the mean. With fewer than two models nothing is exchanged.
    """

    Objective = CrossObjective

    def route(self, state: CrossState, round: Round) -> dict[int, int]:
        """Return each model's next host, slot -> client: a random permutation in which every model moves."""
        slots, clients, stay = self.places(state, round)
        hosts = matching.random(stay, stream(round.seed, "route", round.number, round.exchange))
        return {slot: clients[column] for slot, column in zip(slots, hosts)}

    def guidance(self, state: CrossState, slot: int) -> dict[str, Arrays]:
        """Return the extra arrays that the server sends with model `slot`."""
        return {}

    def exchanges(self, clients_per_round: int) -> int:
        """Return 1 + N_e; 1 where a round has one client."""
        return 1 + (self.params.exchanges if clients_per_round > 1 else 0)

    def init(self, start: Start) -> CrossState:
        """Keep the initial model; check that it ends in a linear classifier if the method uses prototypes."""
        if self.params.uses_prototypes and WEIGHT not in start.arrays:
            raise ConfigError(f"method {type(self).__name__}: needs a model with {WEIGHT}. Choose one of conf/model.")
        shape, dtype = start.spec.get(WEIGHT, ((), ""))
        return CrossState(super().init(start).model, shape=shape, dtype=dtype)

    def dispatch(self, state: CrossState, round: Round) -> list[Task]:
        """Send the global model to all clients in exchange 0, later each model to its next host."""
        config: dict[str, Scalar] = {}
        returns: dict[str, Spec] = {}
        if self.params.uses_prototypes and round.exchange + 1 < self.exchanges(round.clients_per_round):
            config[GROUP] = True
            returns = {GROUP: {"vectors": (state.shape, state.dtype), "present": (state.shape[:1], "bool")}}
        if round.exchange == 0:
            state.learners, state.latest = {}, {}
            return [
                Task(client, slot, state.model, config=config, returns=returns, stream=GLOBAL, fixed=True)
                for slot, client in enumerate(round.clients)
            ]
        if len(state.learners) < 2:
            return []
        hosts, at_host = self.route(state, round), {"epochs": self.params.host_epochs, "lr": self.params.host_lr}
        config |= {name: value for name, value in at_host.items() if value is not None}
        return [
            Task(hosts[slot], slot, learner.arrays, self.guidance(state, slot), config, returns=returns, fixed=True)
            for slot, learner in sorted(state.learners.items())
        ]

    def aggregate(self, state: CrossState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Store the trained models; after the last exchange average them, weighted as ``weight`` says."""
        met: dict[int, list[Prototypes]] = {}
        for upload in uploads:
            found = Prototypes.of(upload.extras[GROUP]) if GROUP in upload.extras else None
            if round.exchange == 0:
                state.learners[upload.slot] = Learner(upload.arrays, upload.num_examples, upload.client, found)
            else:
                learner = state.learners[upload.slot]
                learner.arrays, learner.client, learner.prototypes = upload.arrays, upload.client, found
                if self.params.weight == "host":
                    learner.weight = upload.num_examples
            if found is not None:
                met.setdefault(upload.client, []).append(found)
        # With literal matching several models may train at one host: its prototypes are then the mean of theirs.
        state.latest |= {client: one[0] if len(one) == 1 else average(one) for client, one in met.items()}
        if round.exchange + 1 == self.exchanges(round.clients_per_round) and state.learners:
            learners = [state.learners[slot] for slot in sorted(state.learners)]
            state.model = weighted_mean([one.arrays for one in learners], [one.weight for one in learners])
            state.learners, state.latest = {}, {}
        return {}

    def places(self, state: CrossState, round: Round) -> tuple[list[int], list[int], NDArray[np.bool_]]:
        """Return the slots of the models, their homes, and where each was trained last, bool (models, clients)."""
        slots = sorted(state.learners)
        clients = [round.clients[slot] for slot in slots]
        return (
            slots,
            clients,
            np.array([[state.learners[slot].client == client for client in clients] for slot in slots]),
        )
