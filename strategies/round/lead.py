"""How many visits each client of an asynchronous run has made, and who waits because it is far ahead of the others."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from logging import INFO, WARNING

from flwr.common.logger import log

#: Visits that the median counts as having more: a run begins, and clients are drawn, unequally.
START = 3
#: Accepted visits in a row after which a client that has lost one is a measure for others again.
SOUND = 5
#: Rounds in a row of which one client makes more than half of the visits, until a line says so.
ROUNDS = 3


@dataclass
class Lead:
    """Visits of each client that have ended, and the limit for those that are ahead.

    A client is ahead if it has made at least ``most * (m + START)`` visits, accepted or lost. m is the lower median of
    the connected clients that have been asked, without those that have lost one of their last :data:`SOUND` visits. A
    client that joins counts from m on, so that nobody waits until it has caught up.

    Attributes
    ----------
    most : float or None
        The multiple; None for no limit.
    made, begun : dict of int to int
        Client -> its visits that have ended, and the visits with which it counts from its first one on.
    failed : dict of int to int
        Client that has lost a visit -> accepted ones until it is a measure again.
    """

    most: float | None
    made: dict[int, int] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)
    now: dict[int, int] = field(default_factory=dict)  # visits of this round
    leaders: list[int] = field(default_factory=list)  # who made most of the last rounds' visits
    said: list[str] = field(default_factory=list)

    def ended(self, client: int, *, accepted: bool) -> None:
        """Count a visit of `client` that has ended."""
        self.made[client] = self.made.get(client, 0) + 1
        self.now[client] = self.now.get(client, 0) + 1
        if not accepted:
            self.failed[client] = SOUND
        elif client in self.failed:
            self.failed[client] -= 1
            if not self.failed[client]:
                del self.failed[client]

    def enter(self, client: int, asked: Collection[int]) -> None:
        """Let `client`, which is asked for the first time, count as the median of the connected ones in `asked`."""
        if usual := self._usual(asked):
            self.begun[client] = usual

    def _visits(self, client: int) -> int:
        return self.made.get(client, 0) + self.begun.get(client, 0)

    def _usual(self, asked: Collection[int]) -> int | None:
        """Return the lower median of the visits with which clients count; None if none of them answers."""
        peers = sorted(self._visits(one) for one in asked if one not in self.failed)
        return peers[(len(peers) - 1) // 2] if peers else None

    def behind(self, idle: Sequence[int], asked: Collection[int]) -> list[int]:
        """Return those of the `idle` clients that are not ahead; `asked` are the connected ones ever asked."""
        if self.most is None or not idle or (usual := self._usual(asked)) is None:
            return list(idle)
        left = [one for one in idle if self._visits(one) < self.most * (usual + START)]
        if len(left) < len(idle) and "waits" not in self.said:
            self.said.append("waits")
            ahead = next(one for one in idle if one not in left)
            log(
                INFO, "fedcross: client %d waits for others: it has made %d visits, the median is %d "
                "(federation.lead=%g). No other such line follows.",
                ahead, self.made.get(ahead, 0), usual, self.most,
            )  # fmt: skip
        return left

    def end_round(self, number: int, connected: int) -> None:
        """Say once if one of several connected clients made more than half of the visits of the last rounds."""
        visits, self.now = self.now, {}
        client = max(visits, key=lambda one: visits[one], default=-1)
        total = sum(visits.values())
        if total < 2 or connected < 2 or 2 * visits[client] <= total:
            self.leaders = []
            return
        self.leaders = [one for one in self.leaders if one == client] + [client]
        if len(self.leaders) >= ROUNDS and "most" not in self.said:
            self.said.append("most")
            log(
                WARNING, "fedcross: client %d made more than half of the visits of each of the last %d rounds (%d of "
                "%d in round %d), so the models learn mostly from its data. Lower federation.lead.",
                client, ROUNDS, visits[client], total, number,
            )  # fmt: skip
