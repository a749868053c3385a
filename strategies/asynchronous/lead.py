"""How many visits each client of an asynchronous run has made, and who waits because it is far ahead of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from logging import INFO, WARNING
from typing import Any

from flwr.common.logger import log

from fedcross.strategies.defence.rules import lower_median

#: Visits that the median counts as having more: a run begins, and clients are drawn, unequally.
START = 3
#: Accepted visits in a row after which a client that has lost one is a measure for others again: one that fails now and
#: then would hold all others up at each of its deadlines.
SOUND = 5
#: Rounds in a row of which one client makes more than half of the visits, until a line says so.
ROUNDS = 3
#: What is said once: that a client waits, and that one makes most visits.
TOLD = "waits", "most"


class Lead:
    """Visits of each client that have ended, and the limit for those that are ahead.

    A client is ahead if it has made at least ``most * (m + START)`` visits, accepted or lost. m is the lower median of
    the connected clients that have been asked, without those that have lost one of their last :data:`SOUND` visits:
    clients that do not answer hold nobody up, once they have missed a deadline. A client that joins counts from m on,
    so that nobody waits until it has caught up.

    Parameters
    ----------
    most : float or None
        The multiple; None for no limit.
    told : collection of str
        Those of :data:`TOLD` that are not said any more.

    Attributes
    ----------
    made, lost : Counter
        Client -> its visits that have ended, and those among them that were lost.
    begun : Counter
        Client -> the visits with which it counts from its first one on.
    """

    def __init__(self, most: float | None, told: Collection[str] = ()) -> None:
        self._most = most
        self.made: Counter[int] = Counter()
        self.lost: Counter[int] = Counter()
        self.begun: Counter[int] = Counter()
        self._failed: dict[int, int] = {}  # client that has lost a visit -> accepted ones until it is a measure again
        self._now: Counter[int] = Counter()  # client -> its visits of this round
        self._leaders: list[int] = []  # who made most of the last rounds' visits, of each of them the same one
        self._told: set[str] = set(told)

    def ended(self, client: int, accepted: bool) -> None:
        """Count a visit of `client` that has ended."""
        self.made[client] += 1
        self._now[client] += 1
        self.lost[client] += not accepted
        if not accepted:
            self._failed[client] = SOUND
        elif client in self._failed:
            self._failed[client] -= 1
            if not self._failed[client]:
                del self._failed[client]

    def enter(self, client: int, asked: Collection[int]) -> None:
        """Let `client`, which is asked for the first time, count as the median of the connected ones in `asked`."""
        if usual := self._usual(asked):
            self.begun[client] = usual

    def _usual(self, asked: Collection[int]) -> int | None:
        """Return the lower median of the visits with which clients count; None if none of them answers."""
        peers = [self.made[one] + self.begun[one] for one in asked if one not in self._failed]
        return lower_median(peers) if peers else None

    def behind(self, idle: Sequence[int], asked: Collection[int]) -> list[int]:
        """Return those of the `idle` clients that are not ahead; `asked` are the connected ones that have been asked.

        The first time that somebody is, a line says so.
        """
        if self._most is None or not idle or (usual := self._usual(asked)) is None:
            return list(idle)
        limit = self._most * (usual + START)
        left = [one for one in idle if self.made[one] + self.begun[one] < limit]
        if len(left) < len(idle) and "waits" not in self._told:
            self._told.add("waits")
            ahead = next(one for one in idle if one not in left)
            log(
                INFO,
                "fedcross: client %d waits for others: it has made %d visits, and the median of those that answer is "
                "%d (federation.lead=%g; asynchronous.md). No other such line follows.",
                ahead, self.made[ahead], usual, self._most,
            )  # fmt: skip
        return left

    def end_round(self, number: int, connected: int) -> None:
        """Say once if one of several connected clients made more than half of the visits of the last rounds."""
        visits, self._now = self._now, Counter()
        [(client, most)] = visits.most_common(1) or [(-1, 0)]
        total = visits.total()
        if total < 2 or connected < 2 or 2 * most <= total:
            self._leaders.clear()
            return
        self._leaders = [one for one in self._leaders if one == client] + [client]
        if len(self._leaders) < ROUNDS or "most" in self._told:
            return
        self._told.add("most")
        log(
            WARNING,
            "fedcross: client %d made more than half of the visits of each of the last %d rounds (%d of %d in round "
            "%d), so the models learn mostly from its data. Lower federation.lead, lower clock.deadline_s if others "
            "do not answer, or take clients_per_round below the number of clients.",
            client, ROUNDS, most, total, number,
        )  # fmt: skip

    def plain(self) -> dict[str, Any]:
        """Return the counts as JSON values for a checkpoint."""
        return {
            "made": {str(client): count for client, count in sorted(self.made.items())},
            "lost": {str(client): count for client, count in sorted(self.lost.items()) if count},
            "failed": {str(client): count for client, count in sorted(self._failed.items())},
            "begun": {str(client): count for client, count in sorted(self.begun.items())},
        }

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Take the counts that :meth:`plain` returned; earlier versions kept none, so all begin at 0."""
        self.made = Counter({int(client): int(count) for client, count in plain.get("made", {}).items()})
        self.lost = Counter({int(client): int(count) for client, count in plain.get("lost", {}).items()})
        self._failed = {int(client): int(count) for client, count in plain.get("failed", {}).items()}
        self.begun = Counter({int(client): int(count) for client, count in plain.get("begun", {}).items()})
