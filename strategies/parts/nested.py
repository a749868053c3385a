"""Nested training: a wide model trains its narrower corners too, so that they work without the channels around them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedcross.strategies.parts.objective import Batch, Net, Objective, Prepared, Tensors, Visit
from fedcross.strategies.parts.widths import Widths
from fedcross.tasks.models.slicing.plan import Size

Shapes = tuple[tuple[int, ...], ...]
Table = tuple[Tensor, Tensors]


class Nested(Objective[Widths]):
    """Cross-entropy; with ``nested``, of the model and of its narrower corners.

    With ``nested_steps: in_turn`` and the widths 1, p and q the steps of a visit train 1, p, 1, q, 1, p, ...: every
    second step one of the narrower widths, from the widest on. A model that is narrower than the step's width trains as
    a whole. With ``nested_steps: all`` every step trains 1 + p + q: their losses are added. A corner is the model with
    all other weights set to 0, which computes what the slice computes; only its own weights get a gradient (of the
    others, momentum and weight decay go on). A corner leaves statistics of batch normalisation as they are: those are
    of the model's own width.

    In turn, this is ordered dropout with a fixed order in place of random draws (Horvath et al., FjORD, NeurIPS 2021,
    arXiv 2102.13451), without its distillation. ``all`` is the loss of a slimmable network (Yu et al., ICLR 2019,
    arXiv 1812.08928), which has a norm of its own for every width; here only the statistics are.
    """

    def __init__(self, params: Widths) -> None:
        super().__init__(params)
        #: Shapes of a model's parameters -> masks: of the corners, or, in turn, of a cycle's steps (None: no corner).
        self._masks: dict[Shapes, Sequence[Tensors | None]] = {}
        #: A cycle as tensors, for steps that are recorded on a GPU.
        self._tables: dict[Shapes, Table] = {}

    def corners(self, size: Size) -> Sequence[Size]:
        """Return the sizes that a model of `size` trains besides its own."""
        if not self.params.nested:
            return []
        return [self.params.size(width) for width in sorted(self.params.widths, reverse=True)[1:] if width < size.width]

    def prepare(self, visit: Visit) -> Prepared:
        """Note the masks of this model's corners; they are the same for all clients."""
        corners = [mask for mask in visit.corners if mask]
        if corners and (shapes := shapes_of(visit.params)) not in self._masks:
            if self.params.nested_steps == "all":
                self._masks[shapes] = corners
            else:
                masks = self._masks[shapes] = cycle(visit.corners, len(self.params.widths) - 1)
                if visit.y.device.type != "cpu":
                    self._tables[shapes] = table(masks)
        return {}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        """Return the loss of the whole model, of the corner whose turn it is, or the sum of all."""
        masks = self._masks.get(shapes_of(params)) if self._masks else None
        if masks is None:
            return super().loss(net, params, buffers, batch, prepared)
        if self.params.nested_steps == "all":
            losses = [self._corners_loss(net, params, buffers, batch, prepared, mask) for mask in masks if mask]
            return sum(losses, start=super().loss(net, params, buffers, batch, prepared))
        if not isinstance(batch.step, int):
            return self._recorded_loss(net, params, buffers, batch, prepared)
        mask = masks[batch.step % len(masks)]
        if mask is None:
            return super().loss(net, params, buffers, batch, prepared)
        return self._corners_loss(net, params, buffers, batch, prepared, mask)

    def _corners_loss(
        self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared, mask: Tensors
    ) -> Tensor:
        kept = {name: buffer.clone() for name, buffer in buffers.items()}
        return super().loss(net, corner(params, mask), kept, batch, prepared)

    def _recorded_loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        """Return the loss of a recorded step, which looks its mask up: the same code serves all steps."""
        whole, rows = self._tables.get(shapes_of(params)) or table(self._masks[shapes_of(params)])
        turn = torch.as_tensor(batch.step) % len(whole)
        part = corner(params, {name: row[turn] for name, row in rows.items()})
        kept = {name: buffer.clone() for name, buffer in buffers.items()}
        loss = super().loss(net, part, kept, batch, prepared)
        for name, buffer in buffers.items():
            buffer.copy_(torch.where(whole[turn], kept[name].detach(), buffer))
        return loss


def shapes_of(params: Tensors) -> Shapes:
    """Return the shapes of a model's parameters, which tell its size."""
    return tuple(tuple(p.shape) for p in params.values())


def cycle(corners: Sequence[Tensors], narrower: int) -> list[Tensors | None]:
    """Return the masks of the steps of one cycle; None trains the whole model.

    Parameters
    ----------
    corners : sequence of Tensors
        Masks of the corners that the model has, the widest first.
    narrower : int
        How many widths there are besides the widest one.
    """
    own = [None] * (narrower - len(corners)) + list(corners)
    return [mask for one in own for mask in (None, one)]


def corner(params: Tensors, mask: Tensors) -> Tensors:
    """Return the parameters with all weights beyond a corner set to 0."""
    return {name: p * mask[name] if name in mask else p for name, p in params.items()}


def table(masks: Sequence[Tensors | None]) -> Table:
    """Return the cycle as tensors: whether a step trains the whole model, bool (c,), and the masks, bool (c, ...)."""
    some = {name: mask for one in masks if one for name, mask in one.items()}
    rows = {
        name: torch.stack([one[name] if one and name in one else torch.ones_like(like) for one in masks])
        for name, like in some.items()
    }
    device = next(iter(some.values())).device
    return torch.tensor([one is None for one in masks]).to(device), rows
