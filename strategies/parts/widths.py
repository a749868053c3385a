"""Which slots and clients have which width, and nested training of the widths in one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator
from torch import Tensor

from fedcross.core.settings import Settings
from fedcross.strategies.objective import Batch, Net, Objective, Prepared, Tensors
from fedcross.tasks.models.width import FULL, TOLERANCE, Width

Ratio = Annotated[float, Field(gt=0, le=1)]


class Widths(Settings):
    """Settings of a pool whose models have several widths.

    Parameters
    ----------
    widths : tuple of float
        Shares of the channels that models have, each in (0, 1]; none means that every model is the full one. A client
        trains no model that is wider than its device (``devices.widths``, or the node's ``device.width``).
    shares : tuple of float
        Share of the pool's slots that each width gets; none gives all the same.
    whole : int
        How many of the network's first groups of channels stay whole in every model, as in AdaptiveFL's slices; 0 cuts
        all of them.
    nested : bool
        Whether clients train the narrower corners of a wide model too (:mod:`strategies.parts.nested`).
    nested_steps : {"in_turn", "all"}
        With `nested`: a step trains the whole model or a corner, in turn, or the whole model and all its corners.
    """

    widths: tuple[Ratio, ...] = ()
    shares: tuple[Annotated[float, Field(gt=0)], ...] = ()
    whole: int = Field(0, ge=0)
    nested: bool = False
    nested_steps: Literal["in_turn", "all"] = "in_turn"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        check_widths(self.widths)
        if (self.whole or self.nested) and not self.widths:
            raise ValueError(
                f"{'nested' if self.nested else 'whole'} is for models of several widths; give method.widths=[1.0,0.5]"
            )
        if self.nested_steps != "in_turn" and not self.nested:
            raise ValueError(
                f"nested_steps={self.nested_steps} is for nested training; set method.nested=true, "
                "or give method.nested_steps=in_turn too"
            )
        if self.shares and not self.widths:
            raise ValueError("shares are for models of several widths; give method.widths=[1.0,0.5]")
        if self.shares and len(self.shares) != len(self.widths):
            raise ValueError(
                f"shares {list(self.shares)} are {len(self.shares)}, widths {list(self.widths)} are "
                f"{len(self.widths)}; set shares to one for each width, or to [] for equal ones"
            )
        if self.shares and abs(sum(self.shares) - 1) > TOLERANCE:
            raise ValueError(f"shares {list(self.shares)} sum to {sum(self.shares):g}; they must sum to 1")
        return self

    def remarks(self) -> list[str]:
        """Return warnings about settings that are allowed but unusual."""
        if self.nested and len(self.widths) == 1:
            return [
                f"method.nested=true: with one width, {list(self.widths)}, no model has a narrower corner to train."
            ]
        return []

    def slots(self, k: int) -> list[Width]:
        """Return the size of each of K slots, the widest first; each width has one slot at least.

        Raises
        ------
        ValueError
            If there are fewer slots than widths.
        """
        if not self.widths:
            return [FULL] * k
        if k < len(self.widths):
            raise ValueError(f"{k} slots for {len(self.widths)} widths: every width needs a slot")
        shares = self.shares or [1 / len(self.widths)] * len(self.widths)
        counts = _dealt(shares, k)
        pairs = sorted(zip(self.widths, counts), key=lambda pair: -pair[0])
        return [self.size(width) for width, count in pairs for _ in range(count)]

    def size(self, width: float) -> Width:
        """Return the size of the models of `width`."""
        return Width(width, self.whole) if width < 1 else FULL


def check_widths(widths: Sequence[float]) -> None:
    """Raise a ValueError if two widths are equal."""
    if len(set(widths)) < len(widths):
        raise ValueError(f"widths {list(widths)}: one of them is there twice. Leave it out once")


def _dealt(shares: Sequence[float], k: int) -> list[int]:
    """Return how many of k slots each share gets: the largest remainders are rounded up, nobody gets none."""
    exact = np.asarray(shares) * k
    counts = np.maximum(np.floor(exact + TOLERANCE), 1).astype(int)
    while counts.sum() < k:
        counts[int(np.argmax(exact - counts))] += 1
    while counts.sum() > k:
        counts[int(np.argmax(np.where(counts > 1, counts - exact, -np.inf)))] -= 1
    return [int(count) for count in counts]


def largest(widths: Sequence[Width], budget: float) -> Width | None:
    """Return the first of `widths`, the widest first, that a device of width `budget` can hold."""
    return next((width for width in widths if holds(budget, width)), None)


def holds(budget: float, size: Width) -> bool:
    """Return whether a device of width `budget` can train a model of `size`."""
    return size.ratio <= budget + TOLERANCE


def described(size: Width) -> dict[str, Any]:
    """Return `size` as scalars of a request; nothing for the full model."""
    if size.ratio >= 1:
        return {}
    return {"width": size.ratio, **({"start": size.whole} if size.whole else {})}


def asked(config: Mapping[str, Any]) -> Width:
    """Return the size of the model in a request with scalars `config`."""
    return Width(float(config.get("width", 1.0)), int(config.get("start", 0)))


def trainable_slots(queue: Sequence[int], sizes: Sequence[Width], budgets: Sequence[float]) -> list[int]:
    """Return which slots these clients can train, one each: as many as possible, those first in `queue` preferred.

    Clients of larger budgets can hold all that those of smaller ones can. So a set of slots can be dealt exactly if,
    for every width, there are as many clients that hold it as slots of that width or above (Hall's condition).

    Parameters
    ----------
    queue : sequence of int
        Slots in the order of their claim.
    sizes : sequence of Width
        Width of each slot.
    budgets : sequence of float
        Width of each client's device.
    """
    chosen: list[int] = []
    limits = {sizes[slot] for slot in queue}
    room = {size: sum(holds(budget, size) for budget in budgets) for size in limits}
    for slot in queue:
        own = sizes[slot]
        levels = [size for size in limits if size.ratio <= own.ratio]
        taken = {size: sum(sizes[one].ratio >= size.ratio for one in chosen) for size in levels}
        if all(taken[size] < room[size] for size in levels):
            chosen.append(slot)
    return chosen


def deal_slots(
    slots: Sequence[int], sizes: Sequence[Width], clients: Sequence[int], budgets: Mapping[int, float]
) -> dict[int, int]:
    """Return slot -> client for slots that :func:`trainable_slots` chose: widest first, clients in their order."""
    free, dealt = list(clients), dict[int, int]()
    for slot in sorted(slots, key=lambda one: (-sizes[one].ratio, one)):
        client = next(one for one in free if holds(budgets[one], sizes[slot]))
        free.remove(client)
        dealt[slot] = client
    return {slot: dealt[slot] for slot in sorted(dealt)}


class Nested(Objective[Widths]):
    """Cross-entropy; with ``nested``, of the model and of its narrower corners.

    With ``nested_steps: in_turn`` and the widths 1, p and q the steps of a visit train 1, p, 1, q, 1, p, ...: every
    second step one of the narrower widths, from the widest on. A model that is narrower than the step's width trains as
    a whole. With ``nested_steps: all`` every step trains 1 + p + q: their losses are added. A corner's step computes
    what the slice computes (``client/corner.py``); only its own weights get a gradient (of the others,
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

    def corners(self, size: Width) -> Sequence[Width]:
        """Return the sizes that a model of `size` trains besides its own."""
        if not self.params.nested:
            return []
        return [self.params.size(width) for width in sorted(self.params.widths, reverse=True)[1:] if width < size.ratio]

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
