"""Nested training: a wide model trains its narrower corners too, so that they work without the channels around them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fedcross.strategies.parts.objective import Batch, Net, Objective, Prepared, Tensors
from fedcross.strategies.parts.widths import Widths
from fedcross.tasks.models.slicing.plan import Size


class Nested(Objective[Widths]):
    """Cross-entropy; with ``nested``, of the model and of its narrower corners.

    With ``nested_steps: in_turn`` and the widths 1, p and q the steps of a visit train 1, p, 1, q, 1, p, ...: every
    second step one of the narrower widths, from the widest on. A model that is narrower than the step's width trains as
    a whole. With ``nested_steps: all`` every step trains 1 + p + q: their losses are added. A corner's step computes
    what the slice computes (:class:`client.corner.Corner`); only its own weights get a gradient (of the others,
    momentum and weight decay go on). A corner leaves statistics of batch normalisation as they are: those are of the
    model's own width.

    In turn, this is ordered dropout with a fixed order in place of random draws (Horvath et al., FjORD, NeurIPS 2021,
    arXiv 2102.13451), without its distillation. ``all`` is the loss of a slimmable network (Yu et al., ICLR 2019,
    arXiv 1812.08928), which has a norm of its own for every width; here only the statistics are.
    """

    def __init__(self, params: Widths) -> None:
        super().__init__(params)
        if params.nested and params.nested_steps == "in_turn":
            self.unrecorded = "with method.nested_steps=in_turn the steps of a visit differ"

    def corners(self, size: Size) -> Sequence[Size]:
        """Return the sizes that a model of `size` trains besides its own."""
        if not self.params.nested:
            return []
        return [self.params.size(width) for width in sorted(self.params.widths, reverse=True)[1:] if width < size.width]

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        """Return the loss of the whole model, of the corner whose turn it is, or the sum of all."""
        if self.params.nested_steps != "all":
            return super().loss(self._turn(net, batch.step), params, buffers, batch, prepared)
        loss = super().loss(net, params, buffers, batch, prepared)
        for corner in net.corners:
            loss = loss + super().loss(corner, params, buffers, batch, prepared)
        return loss

    def _turn(self, net: Net, step: int | Tensor) -> Net:
        """Return what a step trains, 0 the first: `net` or one of its corners."""
        if not net.corners:
            return net
        narrower = len(self.params.widths) - 1
        missing = narrower - len(net.corners)  # a narrow model trains as a whole where a wide one trains its width
        turn = int(step) // 2 % narrower
        return net.corners[turn - missing] if int(step) % 2 and turn >= missing else net
