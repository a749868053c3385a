"""HeteroFL: one global model; every client trains the slice of it that its device can hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from pydantic import model_validator

from fedcross.core.settings import Settings
from fedcross.strategies.parts.widths import Width, check_widths, holds
from fedcross.strategies.round.sized_model import SizedModel
from fedcross.strategies.wire.protocol import Upload
from fedcross.tasks.models.slicing.plan import Size


class HeteroFLParams(Settings):
    """Settings of HeteroFL.

    Parameters
    ----------
    widths : tuple of float
        The widths of the slices, called complexity levels a to e in the paper. A client gets the widest that its device
        can hold.
    scaler : bool
        Whether hidden layers of a slice divide their output by the width while they train, so that a narrow model's
        activations are as large as the full model's. Without effect in a network with batch normalisation.
    """

    widths: tuple[Width, ...] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    scaler: bool = True

    @model_validator(mode="after")
    def _different(self) -> Self:
        check_widths(self.widths)
        if not self.widths:
            raise ValueError("widths []: give at least one")
        return self


class HeteroFL(SizedModel[HeteroFLParams]):
    """Diao, Ding and Tarokh, HeteroFL, ICLR 2021 (arXiv 2010.01264).

    A slice of width p has the first ``ceil(p n)`` channels of every hidden dimension. The new value of each weight is
    the plain mean of the uploads that have it, whatever their numbers of examples (the authors' code, ``fed.py``).
    A client's width is fixed by its device, which the paper calls *fix*.

    State: one model, and statistics of batch normalisation for every width; clients keep none. Wire: one slice down,
    one up.

    Deviations:

    - Batch normalisation. The paper keeps no statistics while it trains and measures them once at the end, over all
      clients' data, for each width (static batch normalisation). Here clients keep running statistics, as every method
      of this project does, and the server averages them among the uploads of one width. Training is the same, only the
      evaluation uses other estimates of the same means and variances, and it can take place in any round.
    - The masked loss for clients that lack classes is not here, nor the mode *dynamic*, in which a client's width
      changes from round to round.
    """

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
