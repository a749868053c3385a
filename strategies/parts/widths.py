"""Which slots and clients have which width, and nested training of the widths in one model."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import AfterValidator, Field, model_validator
from torch import Tensor

from fedcross.core.settings import Settings
from fedcross.strategies.objective import Batch, Net, Objective, Prepared, Tensors
from fedcross.tasks.models.width import FULL, TOLERANCE, Width


def different(values: tuple[float, ...]) -> tuple[float, ...]:
    """Return `values`; refuse a tuple that has one of them twice."""
    if len(set(values)) < len(values):
        raise ValueError("one of them is there twice. Leave it out once")
    return values


Ratio = Annotated[float, Field(gt=0, le=1)]
Different = AfterValidator(different)


class Widths(Settings):
    """Settings of a pool whose models have several widths: docs/widths.md."""

    widths: Annotated[tuple[Ratio, ...], Different] = ()
    shares: tuple[Annotated[float, Field(gt=0)], ...] = ()
    whole: int = Field(0, ge=0)
    nested: bool = False
    nested_steps: Literal["in_turn", "all"] = "in_turn"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if not self.widths and (set_ := [n for n in ("whole", "nested", "shares") if getattr(self, n)]):
            raise ValueError(f"{set_[0]} is for models of several widths; give method.widths=[1.0,0.5]")
        if self.nested_steps != "in_turn" and not self.nested:
            raise ValueError(f"nested_steps={self.nested_steps} is for nested training; set method.nested=true")
        if self.shares and (len(self.shares) != len(self.widths) or abs(sum(self.shares) - 1) > TOLERANCE):
            raise ValueError(f"shares {list(self.shares)} must be one for each width and sum to 1; [] gives equal ones")
        return self

    def remarks(self) -> list[str]:
        if self.nested and len(self.widths) == 1:
            return ["method.nested=true: with one width no model has a narrower corner to train."]
        return []

    def faults(self, clients_per_round: int) -> list[str]:
        fault = f"method.widths={list(self.widths)}: each width needs a model. Raise clients_per_round."
        return [fault] if clients_per_round < len(self.widths) else []

    def slots(self, k: int) -> list[Width]:
        """Return the width of each of k slots, as many as widths or more; the widest first, each width at least once.

        The largest remainders are rounded up. Without widths there are none.
        """
        if not self.widths:
            return []
        exact = np.asarray(self.shares or [1 / len(self.widths)] * len(self.widths)) * k
        counts = np.maximum(np.floor(exact + TOLERANCE), 1).astype(int)
        while counts.sum() < k:
            counts[int(np.argmax(exact - counts))] += 1
        while counts.sum() > k:
            counts[int(np.argmax(np.where(counts > 1, counts - exact, -np.inf)))] -= 1
        pairs = sorted(zip(self.widths, counts.tolist()), reverse=True)
        return [self.size(width) for width, count in pairs for _ in range(count)]

    def size(self, width: float) -> Width:
        """Return the size of the models of `width`."""
        return Width(width, self.whole) if width < 1 else FULL


def holds(budget: float, size: Width) -> bool:
    """Return whether a device of width `budget` can train a model of `size`."""
    return size.ratio <= budget + TOLERANCE


def largest(widths: Sequence[Width], budget: float) -> Width | None:
    """Return the first of `widths`, the widest first, that a device of width `budget` can hold."""
    return next((width for width in widths if holds(budget, width)), None)


def described(size: Width) -> dict[str, Any]:
    """Return `size` as scalars of a request; nothing for the full model."""
    if size.ratio >= 1:
        return {}
    return {"width": size.ratio, **({"start": size.whole} if size.whole else {})}


def asked(config: Mapping[str, Any]) -> Width:
    """Return the size of the model in a request with scalars `config`."""
    return Width(float(config.get("width", 1.0)), int(config.get("start", 0)))


def assign(queue: Sequence[int], sizes: Sequence[Width], budgets: Mapping[int, float]) -> dict[int, int]:
    """Return slot -> client, by slot: as many slots as possible find a client, those first in `queue` preferred.

    `sizes` are the widths of the slots, `budgets` those of the clients' devices. A device holds all that narrower ones
    can, so slots find devices if the widest device holds the widest slot, the second the second, and so on. The widest
    slot then takes the first client that holds it.
    """
    devices, chosen = sorted(budgets.values(), reverse=True), list[int]()
    for slot in queue:
        wanted = sorted([*chosen, slot], key=lambda one: -sizes[one].ratio)
        if len(wanted) <= len(devices) and all(holds(have, sizes[one]) for one, have in zip(wanted, devices)):
            chosen.append(slot)
    free, dealt = list(budgets), dict[int, int]()
    for slot in sorted(chosen, key=lambda one: (-sizes[one].ratio, one)):
        dealt[slot] = next(client for client in free if holds(budgets[client], sizes[slot]))
        free.remove(dealt[slot])
    return dict(sorted(dealt.items()))


class Nested(Objective[Widths]):
    """Cross-entropy of the model and of its narrower corners.

    With ``in_turn`` and the widths 1, p and q the steps of a visit train 1, p, 1, q, 1, p, ...; a model narrower than
    the step's width trains as a whole. With ``all`` every step trains 1 + p + q: their losses are added. A corner's
    step has a gradient for its own weights only; momentum and weight decay go on for all, and statistics stay.

    In turn, this is ordered dropout with a fixed order (Horvath et al., FjORD, NeurIPS 2021, arXiv 2102.13451), without
    its distillation. ``all`` is the loss of a slimmable network (Yu et al., ICLR 2019, arXiv 1812.08928), without its
    separate norms.
    """

    def corners(self, size: Width) -> Sequence[Width]:
        """Return the sizes that a model of `size` trains besides its own, the widest first."""
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
        if not net.corners or not int(step) % 2:
            return net
        narrower = len(self.params.widths) - 1
        turn = int(step) // 2 % narrower - (narrower - len(net.corners))  # a narrow model lacks the first corners
        return net.corners[turn] if turn >= 0 else net
