"""Centralized: one model trained on all clients' data together; an upper bound for federated methods."""

from __future__ import annotations

from collections.abc import Sequence

from fedcross.core.settings import Settings
from fedcross.strategies.parts.objective import Objective
from fedcross.strategies.round.single_model import SingleModel
from fedcross.strategies.wire.protocol import Payload, Round
from fedcross.strategies.wire.records import Arrays


class Pooled(Objective[Settings]):
    """Cross-entropy on examples drawn from all clients' data together."""

    pooled = True


class Centralized(SingleModel[Settings]):
    """One model trained on the union of all clients' data, a reference rather than a federated method.

    Each round one client process draws the share K / N of all examples anew, without replacement, and trains on them
    for the usual epochs: on average as many steps as the K drawn clients of any other method take together. With K = N
    it is ordinary training on the whole set. Optimiser and learning rate are those of the clients, and momentum starts
    at zero each round.

    It needs a process that holds all data, so it runs in simulation only.

    State: the global model. Wire: one model down and one up per round, which says nothing about a federated method.
    """

    #: There is only one upload, so the defence has nothing to compare it with.
    defended = False
    interchangeable = False

    Objective = Pooled

    def setup(self, arrays: Arrays) -> None:
        """Keep the initial model."""
        super().setup(arrays)
        self._share = 1.0

    def sample(self, number: int, available: Sequence[int]) -> tuple[int, ...]:
        """Return the first client of the usual draw, which does the work of all drawn clients."""
        drawn = super().sample(number, available)
        self._share = len(drawn) / len(available)
        return drawn[:1]

    def dispatch(self, current: Round) -> list[Payload]:
        """Send the model to that client, and the share of all data that it must draw."""
        payloads = super().dispatch(current)
        for payload in payloads:
            payload.config = {"pooled-share": self._share}
        return payloads
