"""Visits that are under way: what is sent when, which reply belongs to which visit, and which of them ends next.

Each visit is an exchange of its own (:mod:`strategies.round.exchange`) with one slot. Visits that have ended are
written to the same log of replies as rounds.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedcross.core.errors import FederationError, UploadError
from fedcross.strategies.method import Round, Task, Upload
from fedcross.strategies.round.clock import Clock, RealClock, ReplayClock
from fedcross.strategies.round.driver import Driver
from fedcross.strategies.round.exchange import ARRIVED, Exchange
from fedcross.strategies.round.lead import Lead
from fedcross.strategies.round.polling import poll
from fedcross.strategies.wire.protocol import Payload, Ticket

#: Client of a visit of which a replay knows only that it never ended.
NOBODY = -1


@dataclass
class Visit:
    """A visit that is under way.

    Attributes
    ----------
    index : int
        Number of the visit in the run, from 0, in the order of dispatch.
    slot, client : int
        Whose model it trains, and who trains it (:data:`NOBODY` where a replay cannot know).
    round, repeat : int
        Key the client's random draws: ``1 + index // K``, and how often this client was asked before in that round.
    start, finish : float
        Seconds of the run's clock; `finish` is infinite while nobody knows it.
    trained : bool
        Whether the client is asked at all: not if it cannot meet the deadline.
    seen : int
        Uploads that the server had accepted when it sent the model.
    task : Task or None
        What was sent; None to nobody.
    asked : bool
        Whether the client has been asked, by this process or by one before it.
    """

    index: int
    slot: int
    client: int
    round: int
    repeat: int
    start: float
    finish: float
    trained: bool
    seen: int
    task: Task | None
    asked: bool = False


@dataclass
class VisitsState:
    """What a checkpoint holds of the visits: time, counts, slots from the least to the most recently trained one."""

    queue: list[int]
    lead: Lead
    now: float = 0.0
    dispatched: int = 0
    finished: int = 0
    accepted: int = 0
    resting: set[int] = field(default_factory=set)  # clients whose visit was lost since the last accepted upload
    last_asked: dict[int, tuple[int, int]] = field(default_factory=dict)  # client -> round and repeat of its last visit
    open: list[Visit] = field(default_factory=list)


class OpenVisits(Driver):
    """Sends the visits that are under way and collects their replies.

    ``_exchanges`` has request and reply of each slot's visit, once this process has asked.
    """

    _asked_now: set[int]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.slots = self.start.clients_per_round
        self.visits = VisitsState(list(range(self.slots)), Lead(self.settings.lead))
        self._clock: Clock = self.clock or RealClock()
        self._exchanges: dict[int, Exchange] = {}  # slot -> request and reply of its visit, once this process has asked
        self._arrived: deque[Visit] = deque()  # ended visits that are still to be handled, on the real clock
        self._logged: deque[tuple[int, int, float | None]] | None = None  # the log's order, before a crash

    @property
    def open_visits(self) -> dict[int, Visit]:
        """Slot -> its visit that is under way."""
        return {visit.slot: visit for visit in self.visits.open}

    def _round(self, number: int, exchange: int, clients: tuple[int, ...], slots: tuple[int, ...]) -> Round:
        s = self.settings
        connected = dict.fromkeys(self.available, 1.0)
        return Round(number, exchange, clients, s.seed, s.rounds, s.clients_per_round, len(slots), slots, connected)

    def _payload(self, current: Round, task: Task) -> Payload:
        (payload,) = self.sender.payloads(current, [task])
        return payload

    # ---- requests and replies -----------------------------------------------------------------------------------

    def _ask_all(self, grid: Grid, needed: Collection[int] = ()) -> None:
        """Send what has not been sent, the visit that ends first before the others.

        A visit that must end after the last planned round is not sent unless its slot is `needed` after all.
        """
        ends = sorted(visit.finish for visit in self.visits.open)
        left = max(self.settings.rounds * self.slots - self.visits.finished, 0)
        horizon = ends[left - 1] if 0 < left <= len(ends) else math.inf
        for visit in sorted(self.visits.open, key=lambda one: (one.finish, one.slot)):
            if (
                visit.slot not in self._exchanges
                and visit.trained
                and (visit.finish <= horizon or visit.slot in needed)
            ):
                self._ask(visit, grid)

    def _ask(self, visit: Visit, grid: Grid) -> None:
        """Send the request of `visit`, unless the log has its end."""
        sender, place, client, task = self.sender, self._place(visit), visit.client, visit.task
        if task is None:  # a replay knows nothing of it
            return
        current = self._round(visit.round, visit.repeat, (client,), (visit.slot,))
        payload = self._payload(current, task)
        self._asked_now.add(client)
        if visit.asked:  # by the process before this one, which has counted it
            sender.clients.requests[client] -= 1
        visit.asked = True
        over = sender.log is not None and sender.log.is_over(place)
        clock, real = self._clock, self._clock.real
        arrived = (lambda: clock.now(self.visits.now)) if real and isinstance(clock, RealClock) else None
        exchange = self._exchanges[visit.slot] = Exchange(
            current, grid, [payload], sender, {"visit": visit.index}, (), sender.before(place, [payload]), over,
            deadline_s=clock.deadline_s if real else None, log_place=place, arrived=arrived,
        )  # fmt: skip
        exchange.send()
        if over or exchange.inherited:  # asked by the process before this one; it counts when it ends, as every visit
            exchange.counts.update({"requests": 1, "bytes": payload.nbytes})
        elif not exchange.waiting:
            self._ended(visit)

    def _place(self, visit: Visit) -> Round:
        """Return the place of `visit` in the log of replies: two numbers that no other visit has."""
        return self._round(visit.round, visit.index % self.slots, (visit.client,), ())

    def _upload(self, visit: Visit) -> Upload | None:
        exchange = self._exchanges.get(visit.slot)
        return None if exchange is None else exchange.won.get(visit.slot)

    def _waits(self, visit: Visit) -> bool:
        exchange = self._exchanges.get(visit.slot)
        return exchange is not None and bool(exchange.waiting)

    def stray(self, reply: Message) -> None:
        """Take a reply that somebody else has pulled from the grid."""
        self._route([reply])

    def _route(self, replies: Iterable[Message]) -> None:
        """Hand each reply to its visit."""
        for reply in replies:
            asked = reply.metadata.reply_to_message_id
            sent = [v for v in self.visits.open if v.slot in self._exchanges]
            visit = next((v for v in sent if asked in self._exchanges[v.slot].requests), None)
            if visit is None:
                self.ledger.rejected(None, UploadError("unknown", "not an open request"), self.report.rejected)
                continue
            waited = self._waits(visit)
            self._exchanges[visit.slot].take([reply])
            if waited and not self._waits(visit):
                self._ended(visit)

    def _ended(self, visit: Visit) -> None:
        """Note that no reply of `visit` can come any more."""
        upload = self._upload(visit)
        if isinstance(self._clock, RealClock) and self._clock.real and upload is None:
            visit.finish = self._clock.now(self.visits.now)
        if upload is None and self.sender.log is not None:
            self.sender.log.end(self._place(visit), visit.finish)
        self._arrived.append(visit)

    def _poll(self, grid: Grid, visits: Callable[[], Iterable[Visit]]) -> None:
        """Collect replies until none of `visits` waits, or all of those that wait have passed their deadline."""

        def waiting() -> dict[str, Ticket]:
            if not any(self._waits(visit) for visit in visits()):
                return {}
            return {one: ticket for exchange in self._exchanges.values() for one, ticket in exchange.waiting.items()}

        pull = self.sender.pull if self.settings.networked else None
        while missing := [self._exchanges[one.slot] for one in visits() if self._waits(one)]:
            deadline = min(exchange.deadline for exchange in missing)
            for replies in poll(grid, waiting, deadline, pull):
                self._route(replies)
                for exchange in missing:
                    exchange.take([])
            for visit in list(self.visits.open):
                if self._waits(visit) and self._exchanges[visit.slot].deadline <= time.monotonic():
                    self._exchanges[visit.slot].open_slots.clear()
                    self._ended(visit)

    def _next_virtual(self, grid: Grid) -> list[Visit]:
        """Return the visits that end next in virtual time, by slot, when all of their replies are there."""
        first = min(visit.finish for visit in self.visits.open)
        if math.isinf(first):
            raise FederationError(self._endless())
        group = sorted((visit for visit in self.visits.open if visit.finish == first), key=lambda one: one.slot)
        self._ask_all(grid, [visit.slot for visit in group])
        self._poll(grid, lambda: group)
        self._arrived.clear()
        return group

    def _endless(self) -> str:
        """Return why no visit that is under way ends."""
        if isinstance(self.clock, ReplayClock):
            return (
                f"The record has ended {self.visits.finished} visits, and those that are under way in round "
                f"{self.report.round} are not in it. Lower rounds or clients_per_round to those of the recorded run."
            )
        return f"No visit of round {self.report.round} ever ends: lower the seconds of devices."

    def _next_real(self, grid: Grid) -> list[Visit]:
        """Return the visit that ended next: as the log says after a crash, else as it comes."""
        visit = self._next_logged()
        if visit is None:
            while not self._arrived:
                self._poll(grid, lambda: () if self._arrived else self.visits.open)
                self._arrived.extend(one for one in self._settled() if one not in self._arrived)
            visit = self._arrived.popleft()
        if (upload := self._upload(visit)) is not None:
            visit.finish = float(upload.metrics[ARRIVED])
        visit.finish = max(visit.finish, math.nextafter(self.visits.now, math.inf))  # no two at once
        return [visit]

    def _settled(self) -> list[Visit]:
        """Return the open visits whose reply is there or cannot come any more, in the order of dispatch."""
        ended = [one for one in self.visits.open if one.slot in self._exchanges and not self._waits(one)]
        return sorted(ended, key=lambda one: one.index)

    def _next_logged(self) -> Visit | None:
        """Return the open visit that ended next before a crash; None when the log has been used up."""
        while self._logged:
            number, exchange, at = self._logged.popleft()
            for visit in self._settled():
                place = self._place(visit)
                if (place.number, place.exchange) == (number, exchange):
                    visit.finish = visit.finish if at is None else at
                    return visit
        return None

    # ---- checkpoints --------------------------------------------------------------------------------------------

    def saved(self) -> None:
        """Also write replies that have arrived but not been used into the log, which a checkpoint has just emptied."""
        super().saved()
        if (log := self.sender.log) is None:
            return
        early = [
            *self._arrived,
            *(v for v in self.visits.open if self._upload(v) is not None and v not in self._arrived),
        ]
        for visit in early:
            if (upload := self._upload(visit)) is not None:
                log.accept(self._place(visit), upload)
            else:
                log.end(self._place(visit), visit.finish)

    def _visits(self) -> VisitsState:
        return self.visits

    def _resume_visits(self, visits: Any) -> None:
        self.visits = visits
        self.visits.lead.most = self.settings.lead
