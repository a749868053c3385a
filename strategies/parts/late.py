"""The last part of a run: from which round on, and the learning rate there (SWA of FedSAM, IMA)."""

from __future__ import annotations

from fractions import Fraction

from pydantic import Field

from fedcross.core.settings import Settings


def first_late(rounds: int, start: float) -> int:
    """Return the number, from 1, of the first round after a share `start` of all planned `rounds`.

    `start` is taken as it is written: .29 of 100 rounds are 29, while the float's product is a little less.
    """
    return int(Fraction(str(start)) * rounds) + 1


class Swa(Settings):
    """Settings of stochastic weight averaging on the server.

    Parameters
    ----------
    start : float
        Share of the planned rounds after which averaging begins, 0 to 1.
    cycle : int
        c: one global model in c rounds joins the average; with c > 1 the clients' learning rate is cyclic.
    lr : float
        The learning rate falls to this value within each cycle.
    """

    start: float = Field(0.75, ge=0, le=1)
    cycle: int = Field(10, ge=1)
    lr: float = Field(1e-4, gt=0)

    def collects(self, number: int, rounds: int) -> bool:
        """Return whether the global model of round `number` joins the average."""
        late = number - first_late(rounds, self.start)
        return late > 0 and late % self.cycle == 0

    def rate(self, lr: float, number: int, rounds: int) -> float:
        """Return the learning rate of round `number` where it would be `lr` without averaging.

        ``(1 - t) lr + t self.lr`` with ``t = (i mod c + 1)/c``, i the round counted from 0.
        """
        if self.cycle == 1 or number < first_late(rounds, self.start):
            return lr
        t = ((number - 1) % self.cycle + 1) / self.cycle
        return (1 - t) * lr + t * self.lr
