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
#: Rounds in a row of which one client makes more than half of the visits, until a line says so.
ROUNDS = 3


class Lead:
    """Visits of each client that have ended, and the limit for those that are ahead.

    A client is ahead if it has made at least ``most * (m + START)`` visits, accepted or lost. m is the lower median of
    the connected clients that have been asked, without those whose last visit was lost: clients that never answer hold
    nobody up, once they have missed a deadline.

    Parameters
    ----------
    most : float or None
        The multiple; None for no limit.

    Attributes
    ----------
    made, lost : Counter
        Client -> its visits that have ended, and those among them that were lost.
    """

    def __init__(self, most: float | None) -> None:
        self._most = most
        self.made: Counter[int] = Counter()
        self.lost: Counter[int] = Counter()
        self._failed: set[int] = set()  # clients whose last visit was lost
        self._now: Counter[int] = Counter()  # client -> its visits of this round
        self._leaders: list[int] = []  # who made most of the last rounds' visits, of each of them the same one
        self._told: set[str] = set()

    def ended(self, client: int, accepted: bool) -> None:
        """Count a visit of `client` that has ended."""
        self.made[client] += 1
        self._now[client] += 1
        self.lost[client] += not accepted
        (self._failed.discard if accepted else self._failed.add)(client)

    def behind(self, idle: Sequence[int], asked: Collection[int]) -> list[int]:
        """Return those of the `idle` clients that are not ahead; `asked` are the connected ones that have been asked.

        The first time that somebody is, a line says so.
        """
        if self._most is None or not idle or max(self.made[one] for one in idle) < self._most * START:
            return list(idle)
        peers = [self.made[one] for one in asked if one not in self._failed]
        if not peers:
            return list(idle)
        usual = lower_median(peers)
        limit = self._most * (usual + START)
        left = [one for one in idle if self.made[one] < limit]
        if len(left) < len(idle) and "waits" not in self._told:
            self._told.add("waits")
            ahead = next(one for one in idle if self.made[one] >= limit)
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
            "failed": sorted(self._failed),
        }

    def restore(self, plain: Mapping[str, Any]) -> None:
        """Take the counts that :meth:`plain` returned; earlier versions kept none, so all begin at 0."""
        self.made = Counter({int(client): int(count) for client, count in plain.get("made", {}).items()})
        self.lost = Counter({int(client): int(count) for client, count in plain.get("lost", {}).items()})
        self._failed = {int(client) for client in plain.get("failed", ())}
