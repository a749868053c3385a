"""Runs the rounds of a method: draws clients, sends its tasks, hands it the uploads, keeps its state.

:func:`strategies.round.run.open_run` puts everything together that a run needs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.serverapp import Grid

from fedcross.core.errors import ConfigError, StorageError, UploadError
from fedcross.core.randomness import stream
from fedcross.strategies.method import Evaluation, Method, Round, Scalar, Start, Task, Upload
from fedcross.strategies.round.clock import Clock, VirtualClock
from fedcross.strategies.round.exchange import Exchange
from fedcross.strategies.round.ledger import ClientRecords, Ledger, RoundReport
from fedcross.strategies.round.nodes import LocalClients
from fedcross.strategies.round.packing import Average, Packed, averaged, pack, unpack
from fedcross.strategies.round.slot import Slot
from fedcross.strategies.wire.records import Arrays, Payload
from fedcross.tasks.accuracies import spread


@dataclass
class RunState:
    """Everything that a checkpoint holds: the method's state, the filters', what is known of clients, open visits."""

    method: Any
    filters: list[Any] = field(default_factory=list)
    clients: ClientRecords = field(default_factory=ClientRecords)
    visits: Any = None
    average: Average | None = None


def uniform(current: Round, available: Sequence[int]) -> tuple[int, ...]:
    """Draw ``current.count`` of the `available` partition ids (ascending) without replacement."""
    keys = (current.number, current.exchange) if current.exchange else (current.number,)
    drawn = stream(current.seed, "sample", *keys).choice(len(available), size=current.count, replace=False)
    return tuple(available[i] for i in drawn)


class Driver:
    """Runs the rounds of one method.

    Parameters
    ----------
    method, start, ledger : Method, Start, Ledger
        What is run, what it begins with, what its exchanges share.
    clock, local_due, keep : Clock or None, callable, int or None
        The virtual clock that says how long a round takes; whether local accuracies of a round are used; how many
        checkpoints are kept: clients keep the states that the oldest needs. None: only the newest state.
    """

    visits: Any = None  # those under way, of an asynchronous run
    exchange: Any = None  # with the clients of the current grid

    def __init__(
        self, method: Method, start: Start, ledger: Ledger, clock: Clock | None = None,
        local_due: Callable[[int], bool] = lambda _: True, keep: int | None = None,
    ) -> None:  # fmt: skip
        self.method, self.start, self.ledger, self.clock, self.local_due = method, start, ledger, clock, local_due
        self.settings, self.nodes = ledger.settings, ledger.nodes
        self.exchanges = method.exchanges(start.clients_per_round)
        self.state: Any = method.init(start)
        pack(self.state)  # what cannot be stored is named before the first round
        self.average: Average | None = None
        models = method.evaluation(self.state) if self.settings.average != "none" else None
        if models is not None and (method.personal or models.widths or len(models.models) != 1):
            raise ConfigError(f"average: {type(method).__name__} has no single global model. Set average=none.")
        self._kept: deque[dict[int, int]] | None = None if keep is None else deque(maxlen=keep)
        ledger.durable = None if keep is None else {}
        self.available: list[int] = []
        self._began = 0.0

    @property
    def report(self) -> RoundReport:
        """Costs and metrics of the current round so far, or of the last one."""
        return self.ledger.report

    def run_round(self, number: int, grid: Grid, config: Mapping[str, Scalar] | None = None) -> RoundReport:
        """Run one global round with all its exchanges, and return its report; every request holds `config`.

        A FederationError says that fewer clients are connected than a round needs.
        """
        self.ledger.config = config or {}
        current = self.begin(number, grid)
        for index in range(self.exchanges):
            current = replace(current, exchange=index)
            payloads, spares = self.prepare(current)
            self.close(current, self.exchange.carry_out(current, payloads, self.visit_number(current), spares))
        return self.report

    def begin(self, number: int, grid: Grid) -> Round:
        """Wait until enough clients are connected, and draw those of round `number`, or those that the log says."""
        ledger, log = self.ledger, self.ledger.log
        ledger.report = RoundReport(number)
        if self.exchange is None or self.exchange.grid is not grid:
            self.exchange = Exchange(ledger, grid)
        budgets = None if log is None else log.drawn(number)
        if budgets is not None:
            current = self.draw(number, budgets)
            self.available = self.wait(grid, current.clients)
        else:
            self.available = self.wait(grid)
            held = {client: self.nodes.budget(client) for client in self.available} if ledger.widths else {}
            budgets = held or dict.fromkeys(self.available, 1.0)
            if log is not None:
                log.draw(number, budgets)
            current = self.draw(number, budgets)
        if ledger.events:
            ledger.events.tell("round_started", {"round": number, "clients": list(current.clients)})
        return current

    def draw(self, number: int, budgets: Mapping[int, float]) -> Round:
        """Draw the clients of round `number` from those in `budgets`, client -> width."""
        s = self.settings
        count, held = min(s.clients_per_round, len(budgets)), budgets if self.ledger.widths else {}
        current = Round(number, 0, (), s.seed, s.rounds, s.clients_per_round, count=count, budgets=held)
        return self.sampled(current, list(budgets))

    def sampled(self, current: Round, available: Sequence[int]) -> Round:
        """Return `current` with its clients: a uniform draw, which the method may change."""
        current = replace(current, clients=uniform(current, available))
        return replace(current, clients=self.method.sample(self.state, current, available))

    def wait(self, grid: Grid, wanted: Collection[int] = ()) -> list[int]:
        """Return the connected clients, when there are enough, and all `wanted` ones or none of them in time."""
        s = self.settings
        if isinstance(grid, LocalClients):
            return list(self.nodes.online or self.nodes.local(grid, s.needed))
        endless = s.networked and s.nonce and s.min_clients is None
        return self.nodes.wait_for(grid, s.needed, s.wait_s, wanted, endless=endless)

    def visit_number(self, current: Round) -> int:
        """Return the number under which a client stores its state of this exchange; it grows with every exchange."""
        per_round = self.start.clients_per_round if self.method.asynchronous else self.exchanges
        return (current.number - 1) * per_round + current.exchange + 1

    def payloads(self, current: Round, tasks: Sequence[Task]) -> list[Payload]:
        """Return what is sent for `tasks`, after the filters; a ConfigError names a method that fills a slot twice."""
        if len({task.slot for task in tasks}) < len(tasks):
            raise ConfigError(f"method {type(self.method).__name__}: dispatch returns two tasks for one slot.")
        found = [Payload(task, task.arrays, task.arrays) for task in tasks]
        for one in self.ledger.filters:
            found = one.down(current, found)
        return found

    def prepare(self, current: Round) -> tuple[list[Payload], list[int]]:
        """Return what an exchange sends, and its spare clients in the order of asking."""
        self._began = time.perf_counter()
        payloads = self.payloads(current, self.method.dispatch(self.state, current))
        if not (self.settings.reassign or self.settings.hedge):
            return payloads, []
        free = sorted(set(self.available) - {payload.task.client for payload in payloads})
        order = stream(current.seed, "spares", current.number, current.exchange).permutation(len(free))
        return payloads, [free[i] for i in order]

    def close(self, current: Round, slots: Sequence[Slot]) -> dict[int, tuple[str, str]]:
        """Record an exchange and aggregate its uploads; return slot -> why an upload does not count, with details."""
        ledger, report = self.ledger, self.report
        self.add_costs(slots)
        if ledger.log is not None and slots and not slots[0].over:
            ledger.log.end(current)
        report.exchanges += bool(slots)
        report.seconds_training += time.perf_counter() - self._began
        if isinstance(self.clock, VirtualClock):
            before = report.metrics.get("virtual_seconds", 0.0)
            report.metrics["virtual_seconds"] = before + self.clock.longest(slots)
        answered = any(slot.upload is not None and not slot.inherited for slot in slots)
        if ledger.faults and slots:
            asked = {slot.payload.task.client for slot in slots}
            ledger.end_if_common(asked, current.number, len(self.available), answered=answered)
        ledger.heard = ledger.heard or answered
        started = time.perf_counter()
        uploads, refused = self._judged(current, slots)
        self._measure(current, uploads)
        if ledger.events:
            facts = {"round": current.number, "exchange": current.exchange, "uploads": uploads}
            ledger.events.tell("uploads", facts)
        report.metrics.update(self.method.aggregate(self.state, current, uploads))
        for upload in uploads:
            ledger.clients.accepted[upload.client] = self.visit_number(current)
        if current.exchange == self.exchanges - 1:
            self.end_round(current.number)
        report.seconds_aggregation += time.perf_counter() - started
        if ledger.widths and len(self.method.widths(self.start.corners)) > 1:
            for task in sorted((slot.payload.task for slot in slots), key=lambda one: one.width, reverse=True):
                report.width_replies[task.width.text] += any(upload.slot == task.slot for upload in uploads)
        if ledger.events:
            ledger.events.ended(slots, refused)
        return refused

    def add_costs(self, slots: Iterable[Slot]) -> None:
        """Add the requests of `slots` and their rejected replies to the report."""
        for slot in slots:
            self.report.clients += slot.counts["requests"]
            self.report.spares += slot.counts["spares"]
            self.report.bytes_down += slot.counts["bytes"]
            self.report.rejected.update(slot.rejected)

    def _judged(self, current: Round, slots: Sequence[Slot]) -> tuple[list[Upload], dict[int, tuple[str, str]]]:
        """Return the uploads that the filters accept, if they are enough, by slot; and why others do not count."""
        ledger, report = self.ledger, self.report
        uploads = sorted((slot.upload for slot in slots if slot.upload is not None), key=lambda one: one.slot)
        refused: list[tuple[Upload, str, str]] = []
        for one in reversed(ledger.filters):
            verdict = one.judge(current, uploads, {slot.payload.task.slot: slot.payload for slot in slots})
            uploads = verdict.uploads
            refused += verdict.refused
            for name, count in verdict.counts.items():
                if name in ("clipped", "lightened"):
                    setattr(report, name, getattr(report, name) + int(count))
                else:
                    report.metrics[name] = report.metrics.get(name, 0) + count
        if len(uploads) < self.settings.min_replies:
            why = f"{len(uploads)} replies, federation.min_replies={self.settings.min_replies}"
            refused += [(upload, "too_few", why) for upload in uploads]
            uploads = []
        for upload, reason, detail in refused:
            ledger.reject(upload.client, UploadError(reason, detail), report.rejected)
        report.dropped += len(slots) - len(uploads)
        return uploads, {upload.slot: (reason, detail) for upload, reason, detail in refused}

    def _measure(self, current: Round, uploads: Sequence[Upload]) -> None:
        """Add bytes, mean loss and, where they are due, local accuracies of the uploads that are aggregated."""
        report = self.report
        report.bytes_up += sum(upload.nbytes for upload in uploads)
        losses = [(u.metrics["train-loss"], u.num_examples) for u in uploads if "train-loss" in u.metrics]
        if losses:
            total = float(np.sum([loss * examples for loss, examples in losses]))
            report.train_loss = total / sum(examples for _, examples in losses)
        local = [u.metrics["local-accuracy"] for u in uploads if "local-accuracy" in u.metrics]
        if local and self.local_due(current.number):
            report.metrics |= {"local_accuracy": float(np.mean(local)), **spread(local, "local_accuracy")}

    # ---- models and checkpoints -----------------------------------------------------------------------------------

    def end_round(self, number: int) -> None:
        """Take the global model of round `number` into the average, if the run has one."""
        if self.settings.average != "none":
            model = self.method.global_model(self.state)
            self.average = averaged(self.settings, self.average, model, number, self.settings.rounds)

    def global_model(self) -> Arrays:
        """Return the model to evaluate and to deploy: the method's, or its average over rounds."""
        return self.method.global_model(self.state) if self.average is None else self.average.model

    def evaluation(self) -> Evaluation:
        """Return the models whose score is the round's."""
        found = self.method.evaluation(self.state)
        return found if self.average is None else Evaluation([self.average.model], rounds=found.models)

    def saved(self) -> None:
        """Note that the checkpoint is on disk: clients may delete what no kept one needs."""
        if self._kept is not None:
            self._kept.append(dict(self.ledger.clients.accepted))
            if len(self._kept) == self._kept.maxlen:
                self.ledger.durable = self._kept[0]

    def checkpoint(self) -> Packed:
        """Return the whole state of the run; arrays are not copied."""
        filters = [one.state for one in self.ledger.filters]
        packed = pack(RunState(self.state, filters, self.ledger.clients, self.visits, self.average))
        spec = {name: [list(shape), dtype] for name, (shape, dtype) in self.start.spec.items()}
        packed.values |= {"model": spec, "parameters": list(self.start.parameters)}
        return packed

    def restore(self, packed: Packed) -> None:
        """Continue from what :meth:`checkpoint` returned; a StorageError if it is of another model or method."""
        values = {name: value for name, value in packed.values.items() if name not in ("model", "parameters")}
        stored = {name: (tuple(shape), dtype) for name, (shape, dtype) in packed.values.get("model", {}).items()}
        if wrong := sorted(n for n in {*stored, *self.start.spec} if stored.get(n) != self.start.spec.get(n)):
            raise StorageError(
                f"the checkpoint's model has {wrong[0]!r} as {stored.get(wrong[0])}, this run's as "
                f"{self.start.spec.get(wrong[0])}. Continue with the model that the run began with."
            )
        ledger = self.ledger
        fresh = RunState(self.state, [one.state for one in ledger.filters], ClientRecords(), self.visits)
        found: RunState = unpack(Packed(packed.arrays, values), fresh)
        self.state, ledger.clients, self.average = found.method, found.clients, found.average
        for one, state in zip(ledger.filters, found.filters):
            one.state = state
        if found.visits is not None:
            self.visits = found.visits
            self.visits.lead.most = self.settings.lead
        for node in (*ledger.clients.excluded, *(ledger.log.killers() if ledger.log is not None else ())):
            ledger.exclude(node)
