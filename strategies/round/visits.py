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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from flwr.serverapp import Grid

from fedcross.core.errors import ConfigError
from fedcross.strategies.method import Round, Scalar, Upload
from fedcross.strategies.round.clock import RealClock, ReplayClock
from fedcross.strategies.round.ledger import RoundReport
from fedcross.strategies.round.open_visits import OpenVisits, Visit
from fedcross.strategies.round.trail import never_asked, tell_ends
from fedcross.tasks.scoring import spread


class Visits(OpenVisits):
    """Runs the visits of an asynchronous method.

    A client whose visit was lost is not asked again before somebody's upload has been accepted, unless nobody else is
    idle and nothing is under way.
    """

    def run_round(self, number: int, grid: Grid, config: Mapping[str, Scalar] | None = None) -> RoundReport:
        """Run until `number` times K visits of the run have ended, and return the report of this round's visits."""
        ledger, log, visits = self.ledger, self.ledger.log, self.visits
        ledger.config, ledger.report, self.grid = config or {}, RoundReport(number), grid
        self.available = self._wait(grid)
        if log is not None and (before := log.available(number)) is not None:
            self.available = before
        elif log is not None:
            log.draw(number, self.available)
        if isinstance(self.time, RealClock):
            self.time.now(visits.now)  # starts it
        began, self._dispatches, self._groups = visits.now, 0, 0
        self.asked_now = set()
        self._measured: list[dict[str, float]] = []  # of each accepted visit: metrics, examples, staleness
        while visits.finished < number * self.slots:
            started = time.perf_counter()
            self._fill(number)
            self.ask_all()
            group = self.next_group()
            ledger.report.seconds_training += time.perf_counter() - started
            self._handle(number, group)
        self._end_visits(number, began)
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
        self.ledger.end_if_common(self.asked_now, number, len(self.available), answered=bool(rows))
        self.end_round(number)

    # ---- dispatch -----------------------------------------------------------------------------------------------

    def _fill(self, number: int) -> None:
        """Give free slots, the least recently trained first, to idle clients, or as the record says."""
        taken = {visit.slot for visit in self.visits.open}
        free = [slot for slot in self.visits.queue if slot not in taken]
        if isinstance(self.time, ReplayClock):
            self._repeat(self.time, number, free)
            return
        idle = self._idle()
        if slots := tuple(sorted(free[: len(idle)])):
            current = self.round_of(number, self._dispatches, (), slots)
            self._dispatch(replace(current, clients=self.method.sample(self.state, current, idle)))
            self._dispatches += 1

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
            self._dispatch(self.round_of(number, 0, (int(event["client"]),), (int(event["slot"]),)))
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
            number = 1 + visits.dispatched // self.slots
            if client not in visits.last_asked:
                visits.lead.made[client] = visits.lead.usual([o for o in self.available if o in visits.last_asked])
            before, repeat = visits.last_asked.get(client, (0, 0))
            repeat = repeat + 1 if before == number else 0
            visits.last_asked[client] = number, repeat
            place = self.round_of(number, repeat, (client,), (slot,))
            (payload,) = self.payloads(place, [tasks[slot]])
            nbytes, now = payload.nbytes + payload.reply_nbytes, visits.now
            finish, trained = self.time.plan(visits.dispatched, client, self.visit(place), now, nbytes)
            about = (visits.dispatched, slot, client, number, repeat, now, finish, trained, visits.accepted)
            visits.open.append(Visit(*about, tasks[slot]))
            visits.dispatched += 1

    # ---- what becomes of a group --------------------------------------------------------------------------------

    def _handle(self, number: int, group: Sequence[Visit]) -> None:
        """Hand the uploads of `group` to the method and free its slots."""
        started, report, visits, tell = time.perf_counter(), self.report, self.visits, self.ledger.tell
        if isinstance(self.time, RealClock):  # no two at once
            group[0].finish = max(group[0].finish, math.nextafter(visits.now, math.inf))
        visits.now = group[0].finish
        uploads = [upload for visit in group if (upload := self._count(number, visit)) is not None]
        trained = {upload.slot for upload in uploads}
        if tell:
            tell("uploads", {"round": number, "exchange": self._groups, "uploads": uploads})
            for one in group:
                line = {"visit": one.index, "round": number, "group": self._groups, "slot": one.slot,
                        "client": one.client, "start": one.start, "finish": one.finish,
                        "accepted": one.slot in trained, "staleness": visits.accepted - one.seen}  # fmt: skip
                tell("visit_ended", line)
        visits.open = [visit for visit in visits.open if visit not in group]
        visits.finished += len(group)
        clients, slots = tuple(visit.client for visit in group), tuple(visit.slot for visit in group)
        last = visits.finished >= number * self.slots
        current = replace(self.round_of(number, self._groups, clients, slots), budgets={}, last=last)
        report.metrics.update(self.method.aggregate(self.state, current, uploads))
        self._groups += 1
        visits.accepted += len(uploads)
        visits.queue.sort(key=lambda slot: slot in trained)  # stable: the longest waiting slots stay in front
        lost = {visit.client for visit in group if visit.slot not in trained}
        visits.resting = set() if uploads else visits.resting | lost
        report.seconds_aggregation += time.perf_counter() - started

    def _count(self, number: int, visit: Visit) -> Upload | None:
        """Count what `visit` cost and brought, tell how its requests ended, and return its upload, if it has one."""
        report, upload, exchange = self.report, self.upload_of(visit), self.exchange_of.pop(visit.slot, None)
        place = {"round": number, "visit": visit.index}
        if exchange is not None:
            self.add_costs(exchange)
            exchange.place = place
            tell_ends(exchange)
            exchange.forget()
        else:  # beyond the clock's deadline: nobody was asked, and yet a client was lost
            report.clients += 1
            if self.ledger.tell:
                self.ledger.tell("request_ended", {**place, **never_asked(visit.slot, visit.client)})
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
        self.ledger.clients.accepted[visit.client] = self.visit(self.round_of(visit.round, visit.repeat, (), ()))
        return upload
