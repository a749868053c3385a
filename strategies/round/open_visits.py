"""Visits that are under way: what is sent when, which reply belongs to which visit, and which of them ends next."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedcross.core.errors import FederationError, UploadError
from fedcross.strategies.method import Round, Task, Upload
from fedcross.strategies.round.clock import Clock, RealClock
from fedcross.strategies.round.driver import Driver
from fedcross.strategies.round.exchange import Exchange
from fedcross.strategies.round.lead import Lead
from fedcross.strategies.round.polling import Pauses

#: Metric of an upload in the log of accepted replies: when it arrived, in seconds of the real clock.
ARRIVED = "clock-seconds"


@dataclass
class Visit:
    """A visit that is under way.

    Attributes
    ----------
    index, slot, client : int
        Number of the visit in the run, from 0, in the order of dispatch; whose model it trains; who trains it.
    round, repeat : int
        Key the client's random draws: ``1 + index // K``, and how often this client was asked before in that round.
    start, finish : float
        Seconds of the run's clock; `finish` is infinite while nobody knows it.
    trained, asked : bool
        Whether the client is asked at all (not if it cannot meet the deadline), and whether it has been.
    seen, task : int, Task
        Uploads that the server had accepted when it sent the model; what it sent.
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
    task: Task
    asked: bool = False


class VisitExchange(Exchange):
    """The exchange of visit `index`: `arrived`, the real clock, says when its reply came; the log has its own place."""

    def __init__(
        self, *arguments: Any, log_place: Round, index: int, arrived: Callable[[], float] | None,
        deadline_s: float | None, **keywords: Any,
    ) -> None:  # fmt: skip
        super().__init__(*arguments, **keywords)
        self.log_place, self.arrived, self.place = log_place, arrived, {"visit": index}
        self.deadline += 0 if deadline_s is None else deadline_s - self.settings.deadline_s

    def accepted(self, upload: Upload) -> None:
        """Put an accepted upload into the log of replies, with the time of its arrival."""
        if self.arrived is not None:
            upload.metrics = {**upload.metrics, ARRIVED: self.arrived()}
        if self.ledger.log is not None:
            self.ledger.log.accept(self.log_place, upload)


@dataclass
class VisitsState:
    """What a checkpoint holds of the visits: time, counts, slots from the least to the most recently trained one.

    `resting` are clients whose visit was lost since the last accepted upload; `last_asked` has the round and repeat of
    each client's last visit.
    """

    queue: list[int]
    lead: Lead
    now: float = 0.0
    dispatched: int = 0
    finished: int = 0
    accepted: int = 0
    resting: set[int] = field(default_factory=set)
    last_asked: dict[int, tuple[int, int]] = field(default_factory=dict)
    open: list[Visit] = field(default_factory=list)


class OpenVisits(Driver):
    """Sends the visits that are under way and collects their replies; each visit is an exchange of its own."""

    grid: Grid
    visits: VisitsState

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.slots, log = self.start.clients_per_round, self.ledger.log
        self.visits = VisitsState(list(range(self.slots)), Lead(self.settings.lead))
        self.time: Clock = self.clock or RealClock()
        self.exchange_of: dict[int, VisitExchange] = {}  # slot -> its visit's, once this process has asked
        self.asked_now: set[int] = set()  # clients asked in this round
        #: When lost visits ended, as the log of replies says after a crash: place -> seconds of the run's clock.
        self._ends = {(number, place): at for number, place, at in (log.order() if log else ()) if at is not None}

    def round_of(self, number: int, exchange: int, clients: tuple[int, ...], slots: tuple[int, ...]) -> Round:
        """Return the round that a method sees: `exchange` counts dispatches, or arrivals."""
        s = self.settings
        connected = dict.fromkeys(self.available, 1.0)
        return Round(number, exchange, clients, s.seed, s.rounds, s.clients_per_round, len(slots), slots, connected)

    def _place(self, visit: Visit) -> Round:
        """Return the place of `visit` in the log of replies: two numbers that no other visit has."""
        return self.round_of(visit.round, visit.index % self.slots, (visit.client,), ())

    # ---- requests -----------------------------------------------------------------------------------------------

    def ask_all(self, needed: Collection[int] = ()) -> None:
        """Send what has not been sent, the visit that ends first before the others.

        A visit that must end after the last planned round is not sent unless its slot is `needed` after all.
        """
        ends = sorted(visit.finish for visit in self.visits.open)
        left = max(self.settings.rounds * self.slots - self.visits.finished, 0)
        horizon = ends[left - 1] if 0 < left <= len(ends) else math.inf
        for visit in sorted(self.visits.open, key=lambda one: (one.finish, one.slot)):
            wanted = visit.finish <= horizon or visit.slot in needed
            if visit.slot not in self.exchange_of and visit.trained and wanted:
                self._ask(visit)

    def _ask(self, visit: Visit) -> None:
        """Send the request of `visit`, unless the log has its end."""
        ledger, place, client = self.ledger, self._place(visit), visit.client
        current = self.round_of(visit.round, visit.repeat, (client,), (visit.slot,))
        payloads = self.payloads(current, [visit.task])
        self.asked_now.add(client)
        if visit.asked:  # by the process before this one, which has counted it
            ledger.clients.requests[client] -= 1
        visit.asked = True
        over = ledger.log is not None and ledger.log.is_over(place)
        arrived = (self._now, self.time.deadline_s) if isinstance(self.time, RealClock) else (None, None)
        exchange = self.exchange_of[visit.slot] = VisitExchange(
            ledger, current, self.visit(current), self.grid, payloads, before=ledger.logged(place, payloads), over=over,
            log_place=place, index=visit.index, arrived=arrived[0], deadline_s=arrived[1],
        )  # fmt: skip
        exchange.send()
        if over or exchange.inherited:  # asked by the process before this one
            visit.finish = self._ends.get((place.number, place.exchange), visit.finish)
        elif not exchange.waiting:
            self._lost(visit)

    def _now(self) -> float:
        """Return the seconds of the real clock, later than the last event."""
        return self.time.now(self.visits.now) if isinstance(self.time, RealClock) else self.visits.now

    # ---- replies ------------------------------------------------------------------------------------------------

    def upload_of(self, visit: Visit) -> Upload | None:
        """Return the accepted upload of an open visit, None so far or for ever."""
        exchange = self.exchange_of.get(visit.slot)
        return None if exchange is None else exchange.won.get(visit.slot)

    def _waits(self, visit: Visit) -> bool:
        exchange = self.exchange_of.get(visit.slot)
        return exchange is not None and bool(exchange.open_slots)

    def stray(self, reply: Message) -> None:
        """Take a reply that somebody else has pulled from the grid."""
        self._route([reply])

    def _route(self, replies: Iterable[Message]) -> None:
        """Hand each reply to its visit."""
        for reply in replies:
            asked = reply.metadata.reply_to_message_id
            sent = [visit for visit in self.visits.open if visit.slot in self.exchange_of]
            visit = next((one for one in sent if asked in self.exchange_of[one.slot].requests), None)
            if visit is None:
                self.ledger.reject(None, UploadError("unknown", "not an open request"), self.report.rejected)
                continue
            waited = self._waits(visit)
            self.exchange_of[visit.slot].take([reply])
            if waited and not self._waits(visit) and self.upload_of(visit) is None:
                self._lost(visit)

    def _lost(self, visit: Visit) -> None:
        """Note that no reply of `visit` can come any more."""
        visit.finish = self._now() if isinstance(self.time, RealClock) else visit.finish
        if self.ledger.log is not None:
            self.ledger.log.end(self._place(visit), visit.finish)

    def _await(self, visits: Callable[[], Sequence[Visit]]) -> None:
        """Collect replies until none of `visits` waits; one whose deadline has passed waits no longer."""
        pauses = Pauses(self.grid, 0.0)
        while missing := [self.exchange_of[one.slot] for one in visits() if self._waits(one)]:
            replied, pauses.deadline = False, min(exchange.deadline for exchange in missing)
            waiting = {one: sent for exchange in self.exchange_of.values() for one, sent in exchange.waiting.items()}
            for replies in self.ledger.pull(self.grid, waiting):
                self._route(replies)
                replied = replied or bool(replies)
                if not any(map(self._waits, visits())):
                    return
            for exchange in missing:
                exchange.take([])
            for visit in self.visits.open:
                if self._waits(visit) and self.exchange_of[visit.slot].deadline <= time.monotonic():
                    self.exchange_of[visit.slot].open_slots.clear()
                    self._lost(visit)
            pauses.wait(replied)

    def next_group(self) -> list[Visit]:
        """Return the visits that end next, by slot, when their replies are there; on the real clock always one."""
        visits = self.visits
        if isinstance(self.time, RealClock):
            self._await(lambda: () if self._settled() else visits.open)
            return self._settled()[:1]
        first = min(visit.finish for visit in visits.open)
        if math.isinf(first):
            raise FederationError(f"No visit of round {self.report.round} ever ends: lower the seconds of devices.")
        group = sorted((visit for visit in visits.open if visit.finish == first), key=lambda one: one.slot)
        self.ask_all([visit.slot for visit in group])
        self._await(lambda: group)
        return group

    def _settled(self) -> list[Visit]:
        """Return the open visits whose reply is there or cannot come any more, in the order in which they ended."""
        ended = [one for one in self.visits.open if one.slot in self.exchange_of and not self._waits(one)]
        for visit in ended:
            if (upload := self.upload_of(visit)) is not None and isinstance(self.time, RealClock):
                visit.finish = float(upload.metrics[ARRIVED])
        return sorted(ended, key=lambda one: (one.finish, one.index))

    def saved(self) -> None:
        """Also write replies that have arrived but not been used into the log, which a checkpoint has just emptied."""
        super().saved()
        if (log := self.ledger.log) is None:
            return
        for visit in self._settled():
            if (upload := self.upload_of(visit)) is not None:
                log.accept(self._place(visit), upload)
            else:
                log.end(self._place(visit), visit.finish)
