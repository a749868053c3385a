"""FedProc: clients pull embeddings towards global class prototypes, first mostly by contrast, then by cross-entropy."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from fedcross.core.errors import ConfigError
from fedcross.strategies.method import Arrays, Round, Start, Task, Upload
from fedcross.strategies.moon import Projected, project
from fedcross.strategies.objective import Batch, Net, Objective, Outcome, Prepared, Tensors, Trained, Visit, as_tensors
from fedcross.strategies.parts.losses import cross_entropy, embedded
from fedcross.strategies.parts.prototypes import credible
from fedcross.strategies.parts.single_model import ModelState, SingleModel, to_all

CHUNK = 500  # Examples at a time when embeddings are summed after training.


class FedProcParams(Projected):
    unit: bool = False
    ramp: int | None = Field(None, ge=1)


class Prototypical(Objective[FedProcParams]):
    halves = True
    needs = sends = frozenset({"prototypes"})

    def prepare(self, visit: Visit) -> Prepared:
        """Return the prototypes with unit length, (classes, e), and the share of cross-entropy at this round."""
        like = next(iter(visit.params.values()))
        prototypes = as_tensors(visit.extras["prototypes"], like=like)["mean"]
        share = min((visit.round - 1) / (self.params.ramp or visit.rounds), 1.0) if bool(prototypes.any()) else 1.0
        return {"prototypes": functional.normalize(prototypes, dim=1), "share": like.new_tensor(share)}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        z, loss = embedded(net, params, buffers, batch)
        contrast = cross_entropy(functional.normalize(z, dim=1) @ prepared["prototypes"].T, batch)
        share: Tensor = prepared["share"]
        return share * loss + (1 - share) * contrast

    @torch.no_grad()
    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        """Return the sum of the trained model's embeddings for each class, and how many went into it."""
        sums = torch.zeros_like(prepared["prototypes"])
        for rows in (slice(start, start + CHUNK) for start in range(0, len(visit.y), CHUNK)):
            z = visit.net.features(trained.params, trained.buffers, visit.inputs[rows], train=False)
            sums += functional.one_hot(visit.y[rows], visit.classes).to(z.dtype).T @ z
        counts = torch.bincount(visit.y, minlength=visit.classes)
        return Outcome({"prototypes": {"sum": sums.cpu().numpy(), "count": counts.cpu().numpy()}})


@dataclass
class FedProcState(ModelState):
    prototypes: NDArray[np.floating[Any]] = field(default_factory=lambda: np.empty(0))


class FedProc(SingleModel[FedProcParams, FedProcState]):
    """Mu et al., FedProc: Prototypical contrastive federated learning on non-IID data, FGCS 2023.

    Client k minimises ``(r/R) CE + (1 - r/R) contrast`` in round r = 0, 1, ... of R planned ones, with
    ``contrast = -log softmax_y(z . c)``, z the projected embedding and c the class prototypes, all of unit length, no
    temperature. After training it sums its embeddings per class (evaluation behaviour, no augmentation). The server
    averages models as FedAvg does, by examples, and sets ``c_k = sum of sums / sum of counts``.

    State: the global model, with MOON's projection head, and the prototypes (classes x e). Wire: one model and the
    prototypes down; one model, the sums and the int64 counts up.
    Deviations: in the authors' code (MuXutong/FedProc) the network divides the projection by its length, so classifier
    and prototypes see unit vectors (`unit`); R is 100 whatever is planned (`ramp=100`); the head's first layer is as
    wide as its input (`hidden=null`). Without prototypes (the first round) the loss is cross-entropy alone. A class
    that no participant held keeps its prototype, zero at first. Counts that do not add up are ignored.
    """

    Objective = Prototypical

    def network(self, model: nn.Module, deployed: bool = False) -> nn.Module:
        return model if deployed else project(model, self.params, type(self).__name__, self.params.unit)

    def init(self, start: Start) -> FedProcState:
        if "classifier.weight" not in start.arrays:
            raise ConfigError("method FedProc: needs the weights of the classifier; let train.only match them too.")
        state = super().init(start)
        state.prototypes = np.zeros_like(start.arrays["classifier.weight"])
        return state

    def dispatch(self, state: FedProcState, round: Round) -> list[Task]:
        shape, dtype = state.prototypes.shape, str(state.prototypes.dtype)
        returns = {"prototypes": {"sum": (shape, dtype), "count": (shape[:1], "int64")}}
        return to_all(state.model, round, extras={"prototypes": {"mean": state.prototypes}}, returns=returns)

    def step(self, state: FedProcState, round: Round, uploads: list[Upload], sent: Arrays) -> None:
        sums, counts = np.zeros(state.prototypes.shape), np.zeros(len(state.prototypes))
        for upload in uploads:
            sent_sums, sent_counts = (upload.extras["prototypes"][name].astype(np.float64) for name in ("sum", "count"))
            own = credible(sent_counts, upload.num_examples)
            sums += sent_sums * (own.sum() / max(sent_counts.sum(), 1.0))
            counts += own
        held = counts > 0
        state.prototypes = state.prototypes.copy()  # the old array may still be on its way to a client
        state.prototypes[held] = sums[held] / counts[held, None]
