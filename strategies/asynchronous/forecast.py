"""How many visits of an asynchronous run meet the deadline of its virtual clock, without a model or a client.

The same clients are drawn, and the same visits lost, as in the run itself (:mod:`strategies.asynchronous.visits`).
Where a method chooses its clients otherwise (``gitfl``), the share of lost visits is about that of its run.
"""

from __future__ import annotations

import math

from fedcross.core.randomness import stream
from fedcross.strategies.asynchronous.lead import TOLD, Lead
from fedcross.strategies.round.clock import VirtualClock


class Forecast:
    """The visits of a run, played once without training.

    Parameters
    ----------
    clock : VirtualClock
        Says how long each visit takes, and which one is lost.
    slots, clients : int
        K, and the clients of the federation.
    nbytes : int
        Bytes of a visit, both ways together.
    lead : float or None
        ``federation.lead``.

    Attributes
    ----------
    ended, trained : int
        Visits that have ended, and those among them that were trained.
    """

    def __init__(self, clock: VirtualClock, slots: int, clients: int, nbytes: int, lead: float | None) -> None:
        self._clock, self._slots, self._clients, self._nbytes = clock, slots, range(clients), nbytes
        self._lead = Lead(lead, TOLD)
        self._queue = list(range(slots))
        self._open: dict[int, tuple[float, bool, int]] = {}  # slot -> finish, whether it is trained, client
        self._asked: dict[int, tuple[int, int]] = {}
        self._resting: set[int] = set()
        self._now, self._number, self._group, self._begun = 0.0, 1, 0, 0
        self.ended, self.trained = 0, 0

    def play(self, visits: int) -> float:
        """Return the share of trained visits among the first `visits` (and those that end with the last of them)."""
        while self.ended < visits:
            if self.ended >= self._number * self._slots:
                self._number, self._group = 1 + self.ended // self._slots, 0
            self._fill()
            self._now = min(finish for finish, _, _ in self._open.values())
            if math.isinf(self._now):
                break
            self._end([slot for slot in sorted(self._open) if self._open[slot][0] == self._now])
        return self.trained / max(self.ended, 1)

    def _fill(self) -> None:
        """Give free slots to idle clients."""
        idle = self._idle()
        free = sorted([slot for slot in self._queue if slot not in self._open][: len(idle)])
        if not free:
            return
        keys = (self._number, self._group) if self._group else (self._number,)
        drawn = stream(self._clock.seed, "sample", *keys).choice(len(idle), size=len(free), replace=False)
        self._group += 1
        for slot, place in zip(free, drawn):
            self._dispatch(slot, idle[place])

    def _idle(self) -> list[int]:
        busy = {client for _, _, client in self._open.values()}
        idle = [client for client in self._clients if client not in busy]
        willing = [client for client in idle if client not in self._resting]
        if not self._open:
            return willing or idle
        return self._lead.behind(willing, [client for client in self._clients if client in self._asked])

    def _dispatch(self, slot: int, client: int) -> None:
        if client not in self._asked:
            self._lead.enter(client, list(self._asked))
        number = 1 + self._begun // self._slots
        before, repeat = self._asked.get(client, (0, 0))
        repeat = repeat + 1 if before == number else 0
        self._asked[client] = number, repeat
        visit = (number - 1) * self._slots + repeat + 1
        finish, trained = self._clock.plan(self._begun, client, visit, self._now, self._nbytes)
        self._open[slot] = finish, trained, client
        self._begun += 1

    def _end(self, slots: list[int]) -> None:
        """End the visits of `slots`, all at the same time."""
        over = {slot: self._open.pop(slot) for slot in slots}
        for _, trained, client in over.values():
            self._lead.ended(client, trained)
        uploads = {slot for slot, (_, trained, _) in over.items() if trained}
        lost = {client for _, trained, client in over.values() if not trained}
        self._queue.sort(key=lambda slot: slot in uploads)
        self._resting = set() if uploads else self._resting | lost
        self.ended += len(over)
        self.trained += len(uploads)
