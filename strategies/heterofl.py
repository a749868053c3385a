"""HeteroFL: one global model; every client trains the slice of it that its device can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import torch
from pydantic import model_validator
from torch import Tensor
from torch.nn import functional

from fedcross.core.settings import Settings
from fedcross.strategies.parts.objective import Batch, Net, Objective, Outcome, Prepared, Tensors, Trained, Visit
from fedcross.strategies.parts.widths import Width, check_widths, holds
from fedcross.strategies.pool.layout import Array
from fedcross.strategies.round.sized_model import SizedModel
from fedcross.strategies.wire.protocol import Payload, Round, Upload
from fedcross.strategies.wire.records import Arrays, Spec
from fedcross.tasks.models.slicing.plan import Size

HEAD = ("classifier.weight", "classifier.bias")
#: Entry of a message that asks a client for its classes.
ASKED = "held"


class HeteroFLParams(Settings):
    """Settings of HeteroFL.

    Parameters
    ----------
    widths : tuple of float
        The widths of the slices, called complexity levels a to e in the paper. A client gets the widest that its device
        can hold.
    scaler : bool
        Whether hidden layers of a slice divide their output by the slice's share of the widest width, so that a narrow
        model's activations are as large as the widest one's. Not in a network with batch normalisation.
    masked : bool
        Whether a client leaves the classes that it has no example of alone (the paper's masked loss, for clients with
        unequal labels). It then tells the server which classes it has.
    """

    widths: tuple[Width, ...] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    scaler: bool = True
    masked: bool = True

    @model_validator(mode="after")
    def _different(self) -> Self:
        check_widths(self.widths)
        if not self.widths:
            raise ValueError("widths []: give at least one")
        return self


class Masked(Objective[HeteroFLParams]):
    """Cross-entropy of the scores, those of classes that the client has no example of replaced by zero."""

    def prepare(self, visit: Visit) -> Prepared:
        """Return which classes the client lacks, bool (classes,)."""
        return {"absent": torch.bincount(visit.y, minlength=visit.classes) == 0}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        """Return the scalar loss of one batch."""
        scores = net.logits(params, buffers, batch.x).masked_fill(prepared["absent"], 0)
        return batch.mean(functional.cross_entropy(scores, batch.y, reduction="none"))

    def predict(self, net: Net, params: Tensors, buffers: Tensors, x: Tensor, prepared: Prepared) -> Tensor:
        """Return class scores (batch, classes) with the mask, as the authors' code measures local models."""
        return super().predict(net, params, buffers, x, prepared).masked_fill(prepared["absent"], 0)

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        """Send which classes the client has."""
        if not visit.config.get(ASKED):
            return Outcome()
        held = (~prepared["absent"]).cpu().numpy().astype(np.uint8)
        rows = visit.params[HEAD[0]].shape[0]
        if len(held) != rows:  # a layer that is called so and is not the last one: all of it counts
            held = np.ones(rows, np.uint8)
        return Outcome(extras={"labels": {"held": held}})


class HeteroFL(SizedModel[HeteroFLParams]):
    """Diao, Ding and Tarokh, HeteroFL, ICLR 2021 (arXiv 2010.01264).

    A slice of width p has the first ``ceil(p n)`` channels of every hidden dimension. The new value of each weight is
    the plain mean of the uploads that have it, whatever their numbers of examples (the authors' code, ``fed.py``).
    A client's width is fixed by its device, which the paper calls *fix*.

    With `masked` a client's loss takes 0 as the score of every class that it has no example of, so its training leaves
    those rows of the last layer alone, and the mean of a class's row is over the clients that have the class (the
    authors' code, ``models/conv.py`` and ``fed.py``). If every client has every class, this changes nothing.

    State: one model, and statistics of batch normalisation for every width; clients keep none. Wire: one slice down,
    one up, and with `masked` one byte per class up.

    Deviations:

    - Batch normalisation. The paper keeps no statistics while it trains and measures them once at the end, over all
      clients' data, for each width (static batch normalisation). Here clients keep running statistics, as every method
      of this project does, and the server averages them among the uploads of one width. Training is the same, only the
      evaluation uses other estimates of the same means and variances, and it can take place in any round.
    - The last layer is the one called ``classifier``, with the classes on its weight's first axis. In a network without
      it the loss is masked, but the rows of all classes are means over all uploads. Whether its outputs are classes or
      channels is known from the slices; with full widths alone the name is believed. So is a client's word on its
      classes.
    - With ``train.examples`` a client's classes are those of the examples that the visit drew.
    - The authors' code scales hidden layers that have no norm behind them in networks with batch normalisation too;
      here one batch norm turns the scaler off. Layers that are not torch's, or whose weight
      another one uses, are never scaled.
    - The authors clip the gradient's norm at 1, which is ``train.clip=1``.
    - The paper evaluates the full model alone, where the scaler divides by 1. A slice without batch normalisation is
      evaluated and exported as it was trained: the division is in its weights and biases (:meth:`slice_models`).
    - The mode *dynamic*, in which a client's width changes from round to round, is not here.
    """

    @classmethod
    def client_half(cls, params: HeteroFLParams) -> Objective:
        """Return what clients minimise."""
        return Masked(params) if params.masked else Objective(params)

    @classmethod
    def reveals(cls, params: HeteroFLParams) -> bool:
        """Return whether clients send which classes they have."""
        return params.masked

    @property
    def _asks(self) -> bool:
        """Whether clients say which classes they have: there is a ``classifier``, and its outputs are no channels."""
        axes = self.sliced.entries.get(HEAD[0], (None,))
        return self.params.masked and HEAD[0] in self.spec and axes[0] is None

    def dispatch(self, current: Round) -> list[Payload]:
        """Send slices as the base does, and ask for the clients' classes."""
        payloads = super().dispatch(current)
        for payload in payloads if self._asks else ():
            payload.config = {**payload.config, ASKED: True}
        return payloads

    def upload_extras(self, payload: Payload) -> Mapping[str, Spec]:
        """Ask for the classes that the client has."""
        return {"labels": {"held": (self.spec[HEAD[0]][0][:1], "uint8")}} if self._asks else {}

    def slice_models(self) -> dict[Size, Arrays]:
        """Return the global model of every size, as a plain slice that computes what was trained with the scaler."""
        models = self.client_models()
        for size, model in models.items() if self.params.scaler else ():
            divisor = size.width / self.sizes[0].width
            for layer in self.sliced.scaled if divisor < 1 else ():
                for name in (f"{layer}.weight", f"{layer}.bias"):
                    if name in model:
                        model[name] = (model[name] / divisor).astype(model[name].dtype)
        return models

    def client_models(self) -> dict[Size, Arrays]:
        """Return the global model of every size as clients train it."""
        return super().slice_models()

    def global_model(self) -> Arrays:
        """Return the global model of the largest size."""
        return self.slice_models()[self.sizes[0]]

    def having(self, name: str, upload: Upload) -> Array | None:
        """Return which classes the client has, for the last layer."""
        return upload.extras["labels"]["held"] > 0 if name in HEAD and "labels" in upload.extras else None

    @property
    def sizes(self) -> Sequence[Size]:
        """One size for each width, the widest first."""
        return [Size(width) for width in sorted(self.params.widths, reverse=True)]

    def budget_remarks(self) -> list[str]:
        """Return remarks as its base does, and on widths that no device trains."""
        found = super().budget_remarks()
        if not self.budgets or self.federation.networked:
            return found
        trained, widest = {self.largest(budget) for budget in self.budgets.values()}, max(self.budgets.values())
        if idle := [size.width for size in self.sizes if size not in trained and holds(widest, size)]:
            found.append(
                f"method.widths={idle}: no device trains these, because each can hold a wider one, or none of them. "
                "What the run says of such a width is of a corner that nobody trains by itself."
            )
        return found

    def size_for(self, slot: int, client: int) -> Size | None:
        """Return the widest slice that the client's device can hold."""
        return self.largest(self.budget(client))

    def weight(self, upload: Upload) -> float:
        """Return 1: every upload counts the same."""
        return 1.0
