"""The driver of asynchronous methods: every free slot goes out at once, and no slot waits for another one.

At most K = ``clients_per_round`` visits are under way, one for each slot. When a visit ends, its upload is handed to
the method, and its slot goes to another client. Rounds remain as a unit of counting: a round is K visits, accepted or
lost. A client that is far ahead of the others waits (:class:`strategies.round.open_visits.Lead`).

On a virtual clock, visits are handled in the order of virtual time (ties by slot). Visits that end at the same virtual
time are one *group*: the method gets all their uploads at once, and all their slots go out together.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from flwr.serverapp import Grid

from fedcross.core.errors import ConfigError, FederationError
from fedcross.strategies.method import Round, Scalar, Upload
from fedcross.strategies.round.clock import Clock, RealClock, ReplayClock
from fedcross.strategies.round.driver import Driver
from fedcross.strategies.round.exchange import Exchange
from fedcross.strategies.round.ledger import RoundReport
from fedcross.strategies.round.open_visits import Lead, OpenVisit, VisitsState
from fedcross.strategies.round.slot import Slot
from fedcross.strategies.wire.records import Payload
from fedcross.tasks.accuracies import spread

#: Metric of an upload in the log of accepted replies: when it arrived, in seconds of the real clock.
ARRIVED = "clock-seconds"


class Visits(Driver):
    """Runs the visits of an asynchronous method; all that are under way share one :class:`Exchange`.

    A client whose visit was lost is not asked again before somebody's upload has been accepted, unless nobody else is
    idle and nothing is under way.
    """

    exchange: Exchange
    visits: VisitsState

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.k, log = self.start.clients_per_round, self.ledger.log
        self.visits = VisitsState(list(range(self.k)), Lead(self.settings.lead))
        self.time: Clock = self.clock or RealClock()
        self.slots: dict[int, Slot] = {}  # those that this process has sent
        self._measured: list[dict[str, float]] = []  # of each accepted visit of a round: metrics, examples, staleness
        #: When lost visits ended, as the log of replies says after a crash: place -> seconds of the run's clock.
        self._ends = {(number, place): at for number, place, at in (log.order() if log else ()) if at is not None}

    def run_round(self, number: int, grid: Grid, config: Mapping[str, Scalar] | None = None) -> RoundReport:
        """Run until `number` times K visits of the run have ended, and return the report of this round's visits."""
        ledger, log, visits = self.ledger, self.ledger.log, self.visits
        ledger.config, ledger.report = config or {}, RoundReport(number)
        if not self.slots:
            self.exchange = Exchange(ledger, grid, self._arrived, self._lost)
            self.slots = self.exchange.slots
        self.available = self.wait(grid)
        if log is not None and (before := log.drawn(number)) is not None:
            self.available = list(before)
        elif log is not None:
            log.draw(number, dict.fromkeys(self.available, 1.0))
        if isinstance(self.time, RealClock):
            self.time.now(visits.now)  # starts it
        began, dispatches, groups, asked = visits.now, 0, 0, set[int]()
        self._measured = []
        while visits.finished < number * self.k:
            started = time.perf_counter()
            dispatches += self._fill(number, dispatches)
            asked |= self._ask()
            group = self._next_group(asked)
            ledger.report.seconds_training += time.perf_counter() - started
            self._handle(number, groups, group)
            groups += 1
        self._end_visits(number, began)
        ledger.end_if_common(asked, number, len(self.available), answered=bool(self._measured))
        self.end_round(number)
        return ledger.report

    def _end_visits(self, number: int, began: float) -> None:
        """Complete the report of a round that began at this time of the run's clock."""
        report, rows = self.report, self._measured
        report.exchanges = 1
        if losses := [(row["train-loss"], row["examples"]) for row in rows if "train-loss" in row]:
            report.train_loss = sum(loss * n for loss, n in losses) / sum(n for _, n in losses)
        if local := [row["local-accuracy"] for row in rows if "local-accuracy" in row]:
            report.metrics |= {"local_accuracy": sum(local) / len(local), **spread(local, "local_accuracy")}
        if late := [row["staleness"] for row in rows]:
            report.metrics |= {"staleness_mean": sum(late) / len(late), "staleness_max": float(max(late))}
        report.metrics["virtual_seconds"] = self.visits.now - began

    def _round(self, number: int, exchange: int, clients: tuple[int, ...], slots: tuple[int, ...]) -> Round:
        """Return the round that a method sees: `exchange` counts dispatches, or arrivals."""
        s, connected = self.settings, dict.fromkeys(self.available, 1.0)
        return Round(number, exchange, clients, s.seed, s.rounds, s.clients_per_round, len(slots), slots, connected)

    def _place(self, visit: OpenVisit) -> Round:
        """Return the place of `visit` in the log of replies: two numbers that no other visit has."""
        return self._round(visit.round, visit.index % self.k, (visit.client,), ())

    # ---- dispatch -----------------------------------------------------------------------------------------------

    def _fill(self, number: int, dispatches: int) -> bool:
        """Give free slots, the least recently trained first, to idle clients or as the record says; return whether."""
        taken = {visit.slot for visit in self.visits.open}
        free = [slot for slot in self.visits.queue if slot not in taken]
        if isinstance(self.time, ReplayClock):
            self._repeat(self.time, number, free)
            return False
        idle = self._idle()
        if slots := tuple(sorted(free[: len(idle)])):
            self._dispatch(self.sampled(self._round(number, dispatches, (), slots), idle))
        return bool(slots)

    def _repeat(self, clock: ReplayClock, number: int, free: Collection[int]) -> None:
        """Send the visits of an earlier run out that had begun by now; those that never ended are not in its record."""
        visits, slots = self.visits, set(free)
        while visits.dispatched <= clock.last:
            event = clock.events.get(visits.dispatched)
            if event is None:
                visits.dispatched += 1
                continue
            if float(event["start"]) > visits.now or event["slot"] not in slots:
                break
            slots.remove(event["slot"])
            self._dispatch(self._round(number, 0, (int(event["client"]),), (int(event["slot"]),)))
        if not visits.open:
            raise ConfigError(
                f"clock.events: no visit of the record is under way after {visits.now:.5g} s. So this is another run, "
                "lines are missing, or the recorded run has ended: give its method, seed, clients, slots and rounds."
            )

    def _idle(self) -> list[int]:
        visits, busy = self.visits, {visit.client for visit in self.visits.open}
        idle = [client for client in self.available if client not in busy]
        willing = [client for client in idle if client not in visits.resting]
        if not visits.open:  # nobody is there to wait for
            return willing or idle
        return visits.lead.behind(willing, [client for client in self.available if client in visits.last_asked])

    def _dispatch(self, current: Round) -> None:
        """Begin the visits of ``current.slots`` at ``current.clients``."""
        visits, tasks = self.visits, {task.slot: task for task in self.method.dispatch(self.state, current)}
        for slot, client in zip(current.slots, current.clients):
            number = 1 + visits.dispatched // self.k
            if client not in visits.last_asked:
                visits.lead.made[client] = visits.lead.usual([o for o in self.available if o in visits.last_asked])
            before, repeat = visits.last_asked.get(client, (0, 0))
            repeat = repeat + 1 if before == number else 0
            visits.last_asked[client] = number, repeat
            place = self._round(number, repeat, (client,), (slot,))
            (payload,) = self.payloads(place, [tasks[slot]])
            nbytes, store = payload.nbytes + payload.reply_nbytes, self.visit_number(place)
            finish, trained = self.time.plan(visits.dispatched, client, store, visits.now, nbytes)
            about = (visits.dispatched, slot, client, number, repeat, visits.now, finish, trained, visits.accepted)
            visits.open.append(OpenVisit(*about, tasks[slot]))
            visits.dispatched += 1

    def _ask(self, needed: Collection[int] = ()) -> set[int]:
        """Send what has not been sent, the visit that ends first before the others; return the clients.

        A visit that must end after the last planned round is not sent unless its slot is `needed` after all.
        """
        asked, ends = set[int](), sorted(visit.finish for visit in self.visits.open)
        left = max(self.settings.rounds * self.k - self.visits.finished, 0)
        horizon = ends[left - 1] if 0 < left <= len(ends) else math.inf
        for visit in sorted(self.visits.open, key=lambda one: (one.finish, one.slot)):
            if visit.slot in self.slots or not visit.trained or (visit.finish > horizon and visit.slot not in needed):
                continue
            current = self._round(visit.round, visit.repeat, (visit.client,), (visit.slot,))
            asked.add(visit.client)
            if visit.asked:  # by the process before this one, which has counted it
                self.ledger.clients.requests[visit.client] -= 1
            visit.asked, place = True, self._place(visit)
            limit = self.time.deadline_s if isinstance(self.time, RealClock) else None
            payloads = self.payloads(current, [visit.task])
            about = self.visit_number(current), (), place, {"visit": visit.index}, limit
            self.exchange.send(self.exchange.add(current, payloads, *about), [visit.slot])
            slot = self.slots[visit.slot]
            if slot.over or slot.inherited:
                visit.finish = self._ends.get((place.number, place.exchange), visit.finish)
        return asked

    # ---- replies ------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        """Return the seconds of the real clock, later than the last event."""
        return self.time.now(self.visits.now) if isinstance(self.time, RealClock) else self.visits.now

    def _arrived(self, upload: Upload) -> None:
        """Note when an upload arrived on the real clock."""
        if isinstance(self.time, RealClock):
            upload.metrics = {**upload.metrics, ARRIVED: self._now()}

    def _lost(self, slot: Slot) -> None:
        """Note that no reply of a visit can come any more."""
        visit = next(one for one in self.visits.open if one.index == slot.label["visit"])
        visit.finish = self._now() if isinstance(self.time, RealClock) else visit.finish
        if self.ledger.log is not None:
            self.ledger.log.end(slot.place, visit.finish)

    def _next_group(self, asked: set[int]) -> list[OpenVisit]:
        """Return the visits that end next, by slot, when their replies are there; on the real clock always one."""
        visits = self.visits
        if isinstance(self.time, RealClock):
            self.exchange.collect(lambda: bool(self._settled()))
            return self._settled()[:1]
        first = min(visit.finish for visit in visits.open)
        if math.isinf(first):
            raise FederationError(f"No visit of round {self.report.round} ever ends: lower the seconds of devices.")
        group = sorted((visit for visit in visits.open if visit.finish == first), key=lambda one: one.slot)
        asked |= self._ask([visit.slot for visit in group])
        self.exchange.collect(lambda: not any(v.slot in self.slots and self.slots[v.slot].waiting for v in group))
        return group

    def _settled(self) -> list[OpenVisit]:
        """Return the open visits whose reply is there or cannot come any more, in the order in which they ended."""
        ended = [one for one in self.visits.open if one.slot in self.slots and not self.slots[one.slot].waiting]
        for visit in ended:
            if (upload := self.slots[visit.slot].upload) is not None and isinstance(self.time, RealClock):
                visit.finish = float(upload.metrics[ARRIVED])
        return sorted(ended, key=lambda one: (one.finish, one.index))

    def saved(self) -> None:
        """Also write replies that have arrived but not been used into the log, which a checkpoint has just emptied."""
        super().saved()
        if (log := self.ledger.log) is None:
            return
        for visit in self._settled():
            if (upload := self.slots[visit.slot].upload) is not None:
                log.accept(self._place(visit), upload)
            else:
                log.end(self._place(visit), visit.finish)

    # ---- what becomes of a group --------------------------------------------------------------------------------

    def _handle(self, number: int, index: int, group: Sequence[OpenVisit]) -> None:
        """Hand the uploads of `group`, the round's group `index`, to the method and free its slots."""
        started, report, visits, events = time.perf_counter(), self.report, self.visits, self.ledger.events
        if isinstance(self.time, RealClock):  # no two at once
            group[0].finish = max(group[0].finish, math.nextafter(visits.now, math.inf))
        visits.now = group[0].finish
        uploads = [upload for visit in group if (upload := self._count(number, visit)) is not None]
        trained = {upload.slot for upload in uploads}
        if events:
            events.tell("uploads", {"round": number, "exchange": index, "uploads": uploads})
            for one in group:
                line = {"visit": one.index, "round": number, "group": index, "slot": one.slot, "client": one.client,
                        "start": one.start, "finish": one.finish, "accepted": one.slot in trained,
                        "staleness": visits.accepted - one.seen}  # fmt: skip
                events.tell("visit_ended", line)
        visits.open = [visit for visit in visits.open if visit not in group]
        visits.finished += len(group)
        clients, slots = tuple(visit.client for visit in group), tuple(visit.slot for visit in group)
        last = visits.finished >= number * self.k
        current = replace(self._round(number, index, clients, slots), budgets={}, last=last)
        report.metrics.update(self.method.aggregate(self.state, current, uploads))
        visits.accepted += len(uploads)
        visits.queue.sort(key=lambda slot: slot in trained)  # stable: the longest waiting slots stay in front
        lost = {visit.client for visit in group if visit.slot not in trained}
        visits.resting = set() if uploads else visits.resting | lost
        report.seconds_aggregation += time.perf_counter() - started

    def _count(self, number: int, visit: OpenVisit) -> Upload | None:
        """Count what `visit` cost and brought, tell how its requests ended, and return its upload, if it has one."""
        report, place = self.report, self._place(visit)
        ended = self.exchange.end(visit.slot)
        if not ended:  # beyond the clock's deadline: nobody was asked, and yet a client was lost
            never = Payload(visit.task, visit.task.arrays, visit.task.arrays)
            ended = [Slot(never, place, place, counts=Counter(requests=1))]
        self.add_costs(ended)
        ended[0].label, upload = {"round": number, "visit": visit.index}, ended[0].upload
        if self.ledger.events:
            self.ledger.events.ended(ended, {})
        self.visits.lead.ended(visit.client, accepted=upload is not None)
        if upload is None:
            report.dropped += 1
            return None
        report.bytes_up += upload.nbytes
        row = {**upload.metrics, "examples": upload.num_examples, "staleness": self.visits.accepted - visit.seen}
        if not self.local_due(visit.round):
            row.pop("local-accuracy", None)
        self._measured.append(row)
        upload.task, upload.seconds = visit.task, visit.finish - visit.start
        self.ledger.clients.accepted[visit.client] = self.visit_number(self._round(visit.round, visit.repeat, (), ()))
        return upload
