"""The driver of asynchronous methods: every free slot goes out at once, and no slot waits for another one.

At most K = ``clients_per_round`` visits are under way, one for each slot. When a visit ends, its upload is handed to
the method, and its slot goes to another client. Rounds remain as a unit of counting: a round is K visits, accepted or
lost. A client that is far ahead of the others waits (:mod:`strategies.round.lead`).

On a virtual clock, visits are handled in the order of virtual time (ties by slot). Visits that end at the same virtual
time are one *group*: the method gets all their uploads at once, and all their slots go out together.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence

from flwr.serverapp import Grid

from fedcross.core.errors import ConfigError
from fedcross.strategies.method import Round, Scalar, Task, Upload
from fedcross.strategies.round.clock import RealClock, ReplayClock
from fedcross.strategies.round.ledger import RoundReport, never_asked
from fedcross.strategies.round.open_visits import NOBODY, OpenVisits, Visit


class Visits(OpenVisits):
    """Runs the visits of an asynchronous method.

    A client whose visit was lost is not asked again before somebody's upload has been accepted, unless nobody else is
    idle and nothing is under way.
    """

    def run_round(self, number: int, grid: Grid, config: Mapping[str, Scalar] | None = None) -> RoundReport:
        """Run until `number` times K visits of the run have ended, and return the report of this round's visits."""
        self.sender.config = config or {}
        self.ledger.begin(number)
        self.available = self._wait(grid)
        if (log := self.sender.log) is not None:
            if (before := log.available(number)) is None:
                log.draw(number, self.available)
            else:
                self.available = before
        if self._logged is None:
            self._logged = deque(log.order() if log is not None else ())
        if isinstance(self._clock, RealClock):
            self._clock.now(self.visits.now)  # starts it
        began, self._group, self._events, self._losses = self.visits.now, 0, 0, (0.0, 0)
        self._staleness: list[int] = []
        self._local: list[float] = []
        self._asked_now: set[int] = set()
        while self.visits.finished < number * self.slots:
            started = time.perf_counter()
            self._fill(number)
            self._ask_all(grid)
            group = self._next_real(grid) if self._clock.real else self._next_virtual(grid)
            self.report.seconds_training += time.perf_counter() - started
            self._handle(number, group)
        self._end_round(number, began)
        return self.report

    def _end_round(self, number: int, began: float) -> None:
        report, (loss, examples) = self.report, self._losses
        report.exchanges = 1
        if examples:
            report.train_loss = loss / examples
        if self._local:
            report.metrics["local_accuracy"] = sum(self._local) / len(self._local)
        if self._staleness:
            report.metrics["staleness_mean"] = sum(self._staleness) / len(self._staleness)
            report.metrics["staleness_max"] = float(max(self._staleness))
        report.metrics["virtual_seconds"] = self.visits.now - began
        self.visits.lead.end_round(number, len(self.available))
        answered = bool(self._staleness)
        self.ledger.end_if_common(self._asked_now, number, len(self.available), answered=answered)

    # ---- dispatch -----------------------------------------------------------------------------------------------

    def _fill(self, number: int) -> None:
        """Give free slots, the least recently trained first, to idle clients."""
        taken = {visit.slot for visit in self.visits.open}
        free = [slot for slot in self.visits.queue if slot not in taken]
        if isinstance(self._clock, ReplayClock):
            self._repeat(self._clock, number, free)
            return
        idle = self._idle()
        if slots := tuple(sorted(free[: len(idle)])):
            current = self._round(number, self._group, (), slots)
            clients = self.method.sample(self.state, current, idle)
            self._dispatch(self._round(number, self._group, clients, slots))
            self._group += 1

    def _repeat(self, clock: ReplayClock, number: int, free: Sequence[int]) -> None:
        """Send the visits of an earlier run out that had begun by now.

        One that had not ended with that run is not in its record: it goes to nobody, in a slot that the record does not
        need any more.
        """
        planned = clock.due(self.visits.dispatched, self.visits.now, len(free))
        told = [slot for slot, _ in planned if slot is not None]
        if not set(told) <= {*free}:
            raise self._another()
        left = [slot for part in (free[: len(planned)], free[len(planned) :]) for slot in sorted({*part} - {*told})]
        for slot, client in planned:
            if slot is None:
                kept = clock.kept(self.visits.dispatched)
                slot = next((one for one in left if one not in kept), None)
                if slot is None:
                    break
                left.remove(slot)
            if client is None:
                self._add(slot, NOBODY, 1 + self.visits.dispatched // self.slots, 0, math.inf, False, None)
            else:
                self._dispatch(self._round(number, 0, (client,), (slot,)))
        if not self.visits.open:
            raise self._another()

    def _another(self) -> ConfigError:
        return ConfigError(
            f"clock.events: visit {self.visits.dispatched} of the record cannot begin after {self.visits.now:.5g} s in "
            "its slot. So this is another run, or lines are missing: give method, seed, clients and slots of the "
            "record."
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
        tasks = {task.slot: task for task in self.method.dispatch(self.state, current)}
        for slot, client in zip(current.slots, current.clients):
            visits, task = self.visits, tasks[slot]
            number = 1 + visits.dispatched // self.slots
            if client not in visits.last_asked:
                visits.lead.enter(client, [one for one in self.available if one in visits.last_asked])
            before, repeat = visits.last_asked.get(client, (0, 0))
            repeat = repeat + 1 if before == number else 0
            visits.last_asked[client] = number, repeat
            place = self._round(number, repeat, (client,), (slot,))
            payload = self._payload(place, task)
            nbytes, visit = payload.nbytes + payload.reply_nbytes, self.sender.visit(place)
            finish, trained = self._clock.plan(visits.dispatched, client, visit, visits.now, nbytes)
            self._add(slot, client, number, repeat, finish, trained, task)

    def _add(
        self, slot: int, client: int, number: int, repeat: int, finish: float, trained: bool, task: Task | None
    ) -> None:
        now = self.visits
        now.open.append(
            Visit(now.dispatched, slot, client, number, repeat, now.now, finish, trained, now.accepted, task)
        )
        now.dispatched += 1

    # ---- what becomes of a group --------------------------------------------------------------------------------

    def _handle(self, number: int, group: Sequence[Visit]) -> None:
        """Hand the uploads of `group` to the method and free its slots."""
        started, report, visits = time.perf_counter(), self.report, self.visits
        visits.now = group[0].finish
        uploads: list[Upload] = []
        lost: set[int] = set()
        for visit in group:
            upload = self._upload(visit)
            self._count(number, visit, upload)
            visits.lead.ended(visit.client, accepted=upload is not None)
            if upload is None or visit.task is None:
                lost.add(visit.client)
                continue
            upload.task, upload.seconds = visit.task, visit.finish - visit.start
            uploads.append(upload)
            self._staleness.append(visits.accepted - visit.seen)
            place = self._round(visit.round, visit.repeat, (visit.client,), ())
            self.sender.clients.accepted[visit.client] = self.sender.visit(place)
        self.ledger.say("uploads", round=number, exchange=self._events, uploads=uploads)
        for visit in group:
            accepted = visit.client not in lost
            self.ledger.say(
                "visit_ended", visit=visit.index, round=number, group=self._events, slot=visit.slot,
                client=visit.client, start=visit.start,
                finish=visit.finish, accepted=accepted, staleness=visits.accepted - visit.seen,
            )  # fmt: skip
        visits.open = [visit for visit in visits.open if visit not in group]
        slots, clients = tuple(visit.slot for visit in group), tuple(visit.client for visit in group)
        visits.finished += len(group)
        current = Round(
            number, self._events, clients, self.settings.seed, self.settings.rounds, self.slots, len(group), slots,
            last=visits.finished >= number * self.slots,
        )  # fmt: skip
        report.metrics.update(self.method.aggregate(self.state, current, uploads))
        self._events += 1
        visits.accepted += len(uploads)
        trained = {upload.slot for upload in uploads}
        visits.queue.sort(key=lambda slot: slot in trained)  # stable: the longest waiting slots stay in front
        visits.resting = set() if uploads else visits.resting | lost
        report.seconds_aggregation += time.perf_counter() - started

    def _count(self, number: int, visit: Visit, upload: Upload | None) -> None:
        """Count what `visit` cost and brought, and tell how its requests ended; no reply to them is used any more."""
        report, exchange = self.report, self._exchanges.pop(visit.slot, None)
        if exchange is not None:
            report.clients += exchange.counts["requests"]
            report.bytes_down += exchange.counts["bytes"]
            report.rejected.update(exchange.rejected)
            exchange.trail.place = {"round": number, "visit": visit.index}
            exchange.trail.end(exchange.payloads, exchange.won, {})
            exchange.forget()
        else:  # beyond the clock's deadline: nobody was asked, and yet a client was lost
            report.clients += 1
            line = {"round": number, "visit": visit.index, **never_asked(visit.slot, visit.client)}
            self.ledger.say("request_ended", **line)
        report.dropped += upload is None
        if upload is None:
            return
        report.bytes_up += upload.nbytes
        if "local-accuracy" in upload.metrics and self.local_due(visit.round):
            self._local.append(upload.metrics["local-accuracy"])
        if "train-loss" in upload.metrics:
            loss, examples = self._losses
            loss += upload.metrics["train-loss"] * upload.num_examples
            self._losses = loss, examples + upload.num_examples
