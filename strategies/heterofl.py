"""HeteroFL: one global model; every client trains the width of it that its device can hold."""

from dataclasses import replace
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedcross.strategies.method import Evaluation, Round, Settings, Task, Upload
from fedcross.strategies.objective import Batch, Net, Objective, Outcome, Prepared, Tensors, Trained, Visit
from fedcross.strategies.parts.corners import OneModelOfWidths, WidthState
from fedcross.strategies.parts.losses import cross_entropy
from fedcross.strategies.parts.widths import Different, Ratio, largest
from fedcross.strategies.pool.pool import Array
from fedcross.tasks.models.width import Width

HEAD = ("classifier.weight", "classifier.bias")
#: Entry of a message that asks a client for its classes.
ASKED = "held"
AtLeastOne = Annotated[tuple[Ratio, ...], Field(min_length=1), Different]


class HeteroFLParams(Settings):
    widths: AtLeastOne = (1.0, 0.5, 0.25, 0.125, 0.0625)
    scaler: bool = True
    masked: bool = True


class Masked(Objective[HeteroFLParams]):
    """Cross-entropy of the scores, those of classes that the client has no example of replaced by zero."""

    sends = frozenset({"labels"})

    def prepare(self, visit: Visit) -> Prepared:
        """Return which classes the client lacks, bool (classes,)."""
        return {"absent": torch.bincount(visit.y, minlength=visit.classes) == 0}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        return cross_entropy(net.logits(params, buffers, batch.x).masked_fill(prepared["absent"], 0), batch)

    def predict(self, net: Net, params: Tensors, buffers: Tensors, x: Tensor, prepared: Prepared) -> Tensor:
        """Return class scores (batch, classes) with the mask, as the authors' code measures local models."""
        return super().predict(net, params, buffers, x, prepared).masked_fill(prepared["absent"], 0)

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        if not visit.config.get(ASKED):
            return Outcome()
        held = (~prepared["absent"]).cpu().numpy().astype(np.uint8)
        rows = visit.params[HEAD[0]].shape[0]
        if len(held) != rows:  # a layer that is called so and is not the last one: all of it counts
            held = np.ones(rows, np.uint8)
        return Outcome(extras={"labels": {"held": held}})


class HeteroFL(OneModelOfWidths[HeteroFLParams]):
    """Diao, Ding and Tarokh, HeteroFL, ICLR 2021 (arXiv 2010.01264).

    A model of width p has the first ``ceil(p n)`` channels of every hidden dimension. The new value of each weight is
    the plain mean of the uploads that have it, whatever their numbers of examples (the authors' code, ``fed.py``).
    A client trains the widest model that its device can hold, which the paper calls *fix*; *dynamic* is not here.

    With `masked` a client's loss takes 0 as the score of every class that it has no example of, and the mean of a
    class's row of the layer ``classifier`` is over the clients that have the class (``models/conv.py``, ``fed.py``).

    State: one model, and statistics of batch normalisation for every width; clients keep none. Wire: one model down,
    one up, and with `masked` one byte per class up.

    Deviations: clients keep running statistics of batch normalisation, averaged among the uploads of one width; the
    paper measures them once at the end. The scaler divides by the width relative to the widest; one batch norm turns it
    off. Where the outputs of ``classifier`` are hidden channels, or there is no such layer, all uploads' rows count.
    With ``train.examples`` a client's classes are those of the examples that the visit drew. The authors' clipping is
    ``train.clip=1``. A narrow model is evaluated and exported with the scaler's division in its weights.
    """

    def objective(self) -> Objective:
        return Masked(self.params) if self.params.masked else Objective(self.params)

    def width_for(self, state: WidthState, round: Round, slot: int) -> Width | None:
        return largest(state.model.widths, round.budget(round.clients[slot]))

    def dispatch(self, state: WidthState, round: Round) -> list[Task]:
        """Send the models; ask for the clients' classes if the outputs of ``classifier`` are classes, not channels."""
        tasks, model = super().dispatch(state, round), state.model
        rows = len(model.weights.get(HEAD[0], ()))
        if not (self.params.masked and rows and model.corners.shape(HEAD[0], model.widths[-1])[0] == rows):
            return tasks
        returns = {"labels": {"held": ((rows,), "uint8")}}
        return [replace(task, config={ASKED: True}, returns=returns) for task in tasks]

    def merge(self, state: WidthState, uploads: list[Upload]) -> None:
        """Take the plain mean; a row of the last layer counts if its client has the class."""

        def counted(name: str, upload: Upload) -> Array | None:
            return upload.extras["labels"]["held"] > 0 if name in HEAD and "labels" in upload.extras else None

        state.model.merge(uploads, [1.0] * len(uploads), counted)

    def evaluation(self, state: WidthState) -> Evaluation:
        """Return every width's model, as a plain one that computes what was trained with the scaler."""
        trained = super().evaluation(state).widths
        if not self.params.scaler:
            return Evaluation([], trained)
        scaled = {f"{layer}.{part}" for layer in state.model.corners.scaled for part in ("weight", "bias")}
        plain = dict(trained)
        for width, model in trained.items():
            if (divisor := width.ratio / state.model.widths[0].ratio) < 1:
                plain[width] = {n: (a / divisor).astype(a.dtype) if n in scaled else a for n, a in model.items()}
        return Evaluation([], plain, clients=trained)
