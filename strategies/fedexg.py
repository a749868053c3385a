"""FedExg: models train at home, then at random other clients, and are then averaged; the base of FedCT and PGCT.

A round has 1 + N_e exchanges. Exchange 0 is FedAvg's: each client trains the global model on its own data (phase I); it
is the *home* of the model that comes out. In exchanges 1 to N_e the server sends each model to another client, its
*host*, which trains it further (phases II and III). At the end of the round the server averages the models (phase IV).
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from typing_extensions import TypeVar

from fedcross.core.errors import ConfigError
from fedcross.core.randomness import stream
from fedcross.strategies.method import Arrays, Round, Settings, Start, Task, Upload
from fedcross.strategies.objective import Objective, Outcome, Prepared, Trained, Visit, as_arrays, as_tensors
from fedcross.strategies.parts import matching
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.prototypes import average, class_means
from fedcross.strategies.parts.single_model import ModelState, SingleModel, to_all

GROUP = "prototypes"  # Name of the extra group that carries prototypes, both ways.
#: The classifier's entries in a model (every model of ``tasks.models`` ends with a linear ``classifier``).
WEIGHT, BIAS = "classifier.weight", "classifier.bias"


class FedExgParams(Settings):
    exchanges: int = Field(1, ge=1, description="N_e, how often each model is sent to another client in a round")
    host_epochs: int | None = Field(None, ge=1, description="local epochs at a host; train.epochs if unset")
    host_lr: float | None = Field(None, gt=0, description="learning rate at a host in round 1; train.lr if unset")
    weight: Literal["home", "host"] = Field("home", description="client whose number of examples weights a model")

    @property
    def uses_prototypes(self) -> bool:
        """Whether clients must send prototypes."""
        return False


X = TypeVar("X", bound=FedExgParams, default=FedExgParams)


class Crossing(Objective[X]):
    """Cross-entropy; the client also sends prototypes of the trained model if the server asks for them."""

    def __init__(self, params: X) -> None:
        super().__init__(params)
        self.sends = self.needs = frozenset({GROUP}) if params.uses_prototypes else frozenset()

    def prepare(self, visit: Visit) -> Prepared:
        """Return nothing at home; at a host ``host`` (), and the ``vectors`` and ``present`` that the server sent."""
        if visit.exchange == 0:
            return {}
        return {"host": torch.ones((), device=visit.y.device), **as_tensors(visit.extras.get(GROUP, {}), visit.y)}

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        if not visit.config.get(GROUP, False):
            return Outcome()
        own = class_means(visit.net, trained.params, trained.buffers, visit.inputs, visit.y, visit.classes)
        return Outcome({GROUP: as_arrays(own)})


@dataclass
class FedExgState(ModelState):
    """The global model; within a round the last upload of each model by slot, the last prototypes of each client.

    An upload's number of examples is the weight of its model in the mean.
    """

    learners: dict[int, Upload] = field(default_factory=dict)
    latest: dict[int, Arrays] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class FedExg(SingleModel[X, FedExgState]):
    """Exchange by a random permutation, cross-entropy only; a baseline in FedCT's tables (Qi et al., 2024).

    Its own paper was not found; inferred from FedCT's text: FedCT without its three modules. The permutation is uniform
    among those that move every model. A model trains for ``train.epochs`` at home and as many at the host
    (``host_epochs`` changes that), twice FedAvg's work per round.

    State: the global model. Wire: N_e + 1 models down and up, nothing else.

    Where the papers are silent: only clients whose phase I upload was accepted take part in the exchanges. If a host
    fails, its model stays what it was and still counts in the mean. With fewer than two models nothing is exchanged.
    """

    Objective = Crossing

    def match(self, state: FedExgState, round: Round, clients: list[int], stay: matching.Stay) -> matching.Hosts:
        """Return the index in `clients`, the homes, of each model's next host: a random permutation that moves all.

        Models are those of ``state.learners`` by slot; ``stay[i, j]`` says whether j trained model i last.
        """
        return matching.random(stay, stream(round.seed, "route", round.number, round.exchange))

    def route(self, state: FedExgState, round: Round) -> dict[int, int]:
        """Return each model's next host, slot -> client."""
        slots = sorted(state.learners)
        clients = [round.clients[slot] for slot in slots]
        stay = np.array([[state.learners[slot].client == client for client in clients] for slot in slots])
        return {slot: clients[host] for slot, host in zip(slots, self.match(state, round, clients, stay))}

    def guidance(self, state: FedExgState, slot: int) -> dict[str, Arrays]:
        """Return the extra arrays that the server sends with model `slot`."""
        return {}

    def exchanges(self, clients_per_round: int) -> int:
        return 1 + (self.params.exchanges if clients_per_round > 1 else 0)

    def init(self, start: Start) -> FedExgState:
        if self.params.uses_prototypes and WEIGHT not in start.arrays:
            raise ConfigError(f"method {type(self).__name__}: needs a model with {WEIGHT}. Choose one of conf/model.")
        return super().init(start)

    def dispatch(self, state: FedExgState, round: Round) -> list[Task]:
        wanted: dict[str, Any] = {"fixed": True, "config": {}}
        if self.params.uses_prototypes and round.exchange + 1 < self.exchanges(round.clients_per_round):
            shape, dtype = state.model[WEIGHT].shape, str(state.model[WEIGHT].dtype)
            wanted["returns"] = {GROUP: {"vectors": (shape, dtype), "present": (shape[:1], "bool")}}
            wanted["config"] = {GROUP: True}
        if round.exchange == 0:
            state.learners, state.latest = {}, {}
            return to_all(state.model, round, **wanted)
        if len(state.learners) < 2:
            return []
        hosts, at_host = self.route(state, round), {"epochs": self.params.host_epochs, "lr": self.params.host_lr}
        wanted["config"] |= {name: value for name, value in at_host.items() if value is not None}
        return [
            Task(hosts[slot], slot, learner.arrays, self.guidance(state, slot), **wanted)
            for slot, learner in sorted(state.learners.items())
        ]

    def aggregate(self, state: FedExgState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        sent: dict[int, list[Arrays]] = {}
        for upload in uploads:
            weighty = state.learners.get(upload.slot, upload) if self.params.weight == "home" else upload
            own = Task(upload.client, upload.slot, {})  # what the client got need not stay in memory
            state.learners[upload.slot] = replace(upload, num_examples=weighty.num_examples, task=own)
            if GROUP in upload.extras:
                sent.setdefault(upload.client, []).append(dict(upload.extras[GROUP]))
        # With literal matching several models may train at one host: its prototypes are then the mean of theirs.
        state.latest |= {client: one[0] if len(one) == 1 else average(one) for client, one in sent.items()}
        if round.exchange + 1 == self.exchanges(round.clients_per_round) and state.learners:
            learners = [state.learners[slot] for slot in sorted(state.learners)]
            state.model = weighted_mean([one.arrays for one in learners], [float(one.num_examples) for one in learners])
            state.learners, state.latest = {}, {}
        metrics, state.metrics = state.metrics, {}
        return metrics
