"""Requests and replies of an asynchronous method: what is sent when, which reply belongs to which visit, what is next.

Each visit is an exchange of its own (:mod:`strategies.round.exchange`) with one slot, so that tickets, nonces, repeated
requests and the guard are those of every method. Visits that have ended are written to the same log of replies.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedcross.core.errors import FederationError, UploadError
from fedcross.strategies.asynchronous.open_visit import ARRIVED, OpenVisit
from fedcross.strategies.parts.objective import P
from fedcross.strategies.round.base import Method
from fedcross.strategies.round.clock import Clock, RealClock, ReplayClock
from fedcross.strategies.round.exchange import Exchange, poll
from fedcross.strategies.round.federation import Federation
from fedcross.strategies.round.guard import Inbox
from fedcross.strategies.round.logged import answering
from fedcross.strategies.round.trail import LOST
from fedcross.strategies.wire.protocol import Payload, Round, Ticket, Upload


class Asking(Method[P]):
    """Sends the open visits of :class:`strategies.asynchronous.visits.AsyncMethod` and says which of them ends next."""

    open: dict[int, OpenVisit]
    now: float
    finished: int
    _clock: Clock
    _asked_now: set[int]
    _arrived: deque[OpenVisit]
    _logged: deque[tuple[int, int, float | None]] | None

    @property
    def slots(self) -> int:
        """Number of slots K, the most visits under way."""
        return self.federation.clients_per_round

    @abstractmethod
    def payload(self, slot: int, client: int) -> Payload:
        """Return what `slot` sends to `client`; the same until the visit has ended, also after a restart."""

    def _ask_all(self, grid: Grid, config: Mapping[str, Any], needed: Collection[OpenVisit] = ()) -> None:
        """Send what has not been sent, the visit that ends first before the others.

        A visit that must end after the last planned round is not sent unless it is `needed` after all.
        """
        ends = sorted(visit.finish for visit in self.open.values())
        left = max(self.federation.rounds * self.slots - self.finished, 0)
        horizon = ends[left - 1] if 0 < left <= len(ends) else math.inf
        for visit in sorted(self.open.values(), key=lambda one: (one.finish, one.slot)):
            if visit.exchange is None and visit.trained and (visit.finish <= horizon or visit in needed):
                self._ask(visit, grid, config)

    def _ask(self, visit: OpenVisit, grid: Grid, config: Mapping[str, Any]) -> None:
        """Send the request of `visit`, unless the log has its end."""
        rules, logged, compressor = self.federation, self.log, self._compressor
        current = Round(visit.round, visit.repeat, (visit.client,), rules.seed)
        payload, place = self.payload(visit.slot, visit.client), self._place(visit)
        self._sent[visit.slot] = payload.arrays
        self._asked_now.add(visit.client)
        if visit.asked:  # by the process before this one, which has counted it
            self.requests[visit.client] -= 1
        visit.asked = True
        inbox = Inbox(
            rules.nonce,
            lambda client, error: self._refused(visit, client, error),
            on_accepted=lambda upload: self._accept(visit, upload),
            decode=None if compressor is None else lambda one: compressor.up(one, self._sent.get(one.slot, {})),
            trail=self._trail(visit=visit.index),
        )
        for upload in answering(self, logged, place, [payload]) if logged is not None else ():
            inbox.take(upload)
        over = logged is not None and logged.is_over(place)

        def ask(one: Payload, seconds: float) -> tuple[Message, Ticket] | None:
            return self._request(current, one, config, seconds)

        visit.exchange = Exchange(current, grid, self._rules(), [payload], inbox, ask, [], (), over)
        visit.exchange.send()
        if over or inbox.won:  # asked by the process before this one; it counts when it ends, as every visit
            visit.exchange.counts.update({"requests": 1, "bytes": payload.nbytes})
        elif not visit.waiting:
            self._ended(visit)

    def _rules(self) -> Federation:
        """Return the federation's rules with the clock's deadline, where that is one of real time."""
        limit = self._clock.deadline_s if self._clock.real else None
        return self.federation if limit is None else self.federation.model_copy(update={"deadline_s": limit})

    def _place(self, visit: OpenVisit) -> Round:
        """Return the place of `visit` in the log of replies: two numbers that no other visit has."""
        return Round(visit.round, visit.index % self.slots, (visit.client,), self.federation.seed)

    # ---- replies ------------------------------------------------------------------------------------------------

    def _refused(self, visit: OpenVisit, client: int | None, error: UploadError) -> None:
        """Note a rejected reply of `visit`; it counts in the round that counts the visit, as its line in the trail."""
        if error.reason != LOST:
            visit.rejected[error.reason] += 1
        self._heed(client, error)

    def _accept(self, visit: OpenVisit, upload: Upload) -> None:
        """Write an accepted upload to the log, with the time of its arrival on the real clock."""
        if isinstance(self._clock, RealClock) and self._clock.real:
            stamped = replace(upload, metrics={**upload.metrics, ARRIVED: self._clock.now(self.now)})
            if visit.exchange is not None:
                visit.exchange.inbox.won[visit.slot] = stamped
            upload = stamped
        if self.log is not None:
            self.log.accept(self._place(visit), upload)

    def stray(self, reply: Message) -> None:
        """Take a reply that somebody else has pulled from the grid."""
        self._route([reply])

    def _route(self, replies: Iterable[Message]) -> None:
        """Hand each reply to its visit."""
        for reply in replies:
            asked = reply.metadata.reply_to_message_id
            visit = next((one for one in self.open.values() if one.knows(asked)), None)
            if visit is None or visit.exchange is None:
                self._rejected(None, UploadError("unknown", "not an open request"))
                continue
            waited = visit.waiting
            visit.exchange.take([reply])
            if waited and not visit.waiting:
                self._ended(visit)

    def _ended(self, visit: OpenVisit) -> None:
        """Note that no reply of `visit` can come any more."""
        if isinstance(self._clock, RealClock) and self._clock.real and visit.upload is None:
            visit.finish = self._clock.now(self.now)
        if visit.upload is None and self.log is not None:
            self.log.end(self._place(visit), visit.finish)
        self._arrived.append(visit)

    def _poll(self, grid: Grid, visits: Callable[[], Iterable[OpenVisit]]) -> None:
        """Collect replies until none of `visits` waits, or all of those that wait have passed their deadline."""

        def waiting() -> list[str]:
            if not any(visit.waiting for visit in visits()):
                return []
            return [one for visit in self.open.values() if visit.exchange for one in visit.exchange.inbox.waiting]

        while missing := [one.exchange for one in visits() if one.exchange is not None and one.waiting]:
            deadline = min(exchange.deadline for exchange in missing)
            for replies in poll(grid, waiting, deadline):
                self._route(replies)
                for exchange in missing:
                    exchange.take([])
            for visit in list(self.open.values()):
                if visit.waiting and visit.exchange is not None and visit.exchange.deadline <= time.monotonic():
                    visit.give_up()
                    self._ended(visit)

    def _next_virtual(self, grid: Grid, config: Mapping[str, Any]) -> list[OpenVisit]:
        """Return the visits that end next in virtual time, by slot, when all of their replies are there."""
        first = min(visit.finish for visit in self.open.values())
        if math.isinf(first):
            raise FederationError(self._endless())
        group = [self.open[slot] for slot in sorted(self.open) if self.open[slot].finish == first]
        self._ask_all(grid, config, group)
        self._poll(grid, lambda: group)
        self._arrived.clear()
        return group

    def _endless(self) -> str:
        """Return why no visit that is under way ends."""
        if isinstance(self.clock, ReplayClock):
            return (
                f"The record has ended {self.finished} visits, and those that are under way in round "
                f"{self._report.round} are not in it. Lower rounds or clients_per_round to those of the recorded run; "
                "if they are, lines of the record are missing."
            )
        return f"No visit of round {self._report.round} ever ends: lower the seconds of devices."

    def _next_real(self, grid: Grid) -> list[OpenVisit]:
        """Return the visit that ended next: as the log says after a crash, else as it comes."""
        visit = self._next_logged()
        if visit is None:
            while not self._arrived:
                self._poll(grid, lambda: () if self._arrived else self.open.values())
                self._arrived.extend(one for one in self._settled() if one not in self._arrived)
            visit = self._arrived.popleft()
        if visit.upload is not None:
            visit.finish = float(visit.upload.metrics[ARRIVED])
        visit.finish = max(visit.finish, math.nextafter(self.now, math.inf))  # no two at once: each is a group
        return [visit]

    def _settled(self) -> list[OpenVisit]:
        """Return the open visits whose reply is there or cannot come any more, in the order of dispatch."""
        ended = [one for one in self.open.values() if one.exchange is not None and not one.waiting]
        return sorted(ended, key=lambda one: one.index)

    def _next_logged(self) -> OpenVisit | None:
        """Return the open visit that ended next before a crash; None when the log has been used up."""
        while self._logged:
            *place, at = self._logged.popleft()
            for visit in self._settled():
                found = self._place(visit)
                if [found.number, found.exchange] == place:
                    visit.finish = visit.finish if at is None else at
                    return visit
        return None
