"""Runs the rounds of a method: draws clients, sends its tasks, hands it the uploads, keeps its state.

:func:`strategies.round.run.open_run` puts everything together that a run needs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import Message
from flwr.serverapp import Grid

from fedcross.core.errors import StorageError, UploadError
from fedcross.core.randomness import stream
from fedcross.strategies.method import Evaluation, Method, Round, Scalar, Start, Task, Upload
from fedcross.strategies.round.average import Average, averaged, refuse_without_model
from fedcross.strategies.round.clock import Clock, VirtualClock
from fedcross.strategies.round.exchange import Exchange
from fedcross.strategies.round.ledger import ClientRecords, Ledger, RoundReport
from fedcross.strategies.round.packing import Packed, check, pack, unpack
from fedcross.strategies.round.trail import tell_ends
from fedcross.strategies.wire.protocol import Payload
from fedcross.strategies.wire.records import Arrays
from fedcross.tasks.scoring import spread


@dataclass
class RunState:
    """Everything that a checkpoint holds: the method's state, the filters', what is known of clients, open visits."""

    method: Any
    filters: list[Any] = field(default_factory=list)
    clients: ClientRecords = field(default_factory=ClientRecords)
    visits: Any = None
    average: Average | None = None


class Driver:
    """Runs the rounds of one method.

    Parameters
    ----------
    method, start, ledger : Method, Start, Ledger
        What is run, what it begins with, what its exchanges share.
    clock, local_due : Clock, callable, optional
        The virtual clock that says how long a round takes; whether local accuracies of a round are used.
    keep : int, optional
        How many checkpoints are kept: clients keep the states that the oldest needs. None: only the newest state.
    """

    #: The visits under way, of an asynchronous run.
    visits: Any = None

    def __init__(
        self,
        method: Method,
        start: Start,
        ledger: Ledger,
        clock: Clock | None = None,
        local_due: Callable[[int], bool] = lambda _: True,
        keep: int | None = None,
    ) -> None:
        self.method, self.start, self.ledger, self.clock, self.local_due = method, start, ledger, clock, local_due
        self.settings, self.nodes = ledger.settings, ledger.nodes
        self.needed = ledger.settings.needed
        self.exchanges = method.exchanges(start.clients_per_round)
        self.state: Any = method.init(start)
        check(self.state)  # what cannot be stored is named before the first round
        self.average: Average | None = None
        if self.settings.average != "none":
            refuse_without_model(method, self.state)
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

        Raises
        ------
        FederationError
            If fewer clients are connected than a round needs.
        """
        self.ledger.config = config or {}
        current = self.begin(number, grid)
        for index in range(self.exchanges):
            exchange = self.open(replace(current, exchange=index), grid)
            exchange.carry_out()
            self.close(exchange)
        return self.report

    def begin(self, number: int, grid: Grid) -> Round:
        """Wait until enough clients are connected, start an empty report, draw the clients of round `number`."""
        ledger, settings, log = self.ledger, self.settings, self.ledger.log
        ledger.report = RoundReport(number)
        before = None if log is None else log.available(number)
        told = None if log is None or before is None else log.widths(number)
        if before is None or (ledger.widths and told is None):
            self.available = self._wait(grid)
            told = self.nodes.widths() if ledger.widths else None
            if log is not None and before is None:
                log.draw(number, self.available, told)
        drawn_from = self.available if before is None else before
        known = {**self.nodes.budgets, **(told or {})}
        budgets = {client: known.get(client, 1.0) for client in drawn_from} if ledger.widths else {}
        current = Round(
            number, 0, (), settings.seed, settings.rounds, settings.clients_per_round,
            count=min(settings.clients_per_round, len(drawn_from)), budgets=budgets,
        )  # fmt: skip
        clients = self.method.sample(self.state, current, drawn_from)
        if before is not None:
            self.available = self._wait(grid, clients)
        if ledger.tell:
            ledger.tell("round_started", {"round": number, "clients": list(clients)})
        return replace(current, clients=clients)

    def _wait(self, grid: Grid, wanted: Collection[int] = ()) -> list[int]:
        s = self.settings
        endless = s.networked and s.nonce and s.min_clients is None
        return self.nodes.wait_for(grid, self.needed, s.wait_s, wanted, endless=endless)

    def visit(self, current: Round) -> int:
        """Return the number under which a client stores its state of this exchange; it grows with every exchange."""
        return (current.number - 1) * self.ledger.per_round + current.exchange + 1

    def payloads(self, current: Round, tasks: Sequence[Task]) -> list[Payload]:
        """Return what is sent for `tasks`, after the filters."""
        found = [Payload.of(task) for task in tasks]
        for one in self.ledger.filters:
            found = one.down(current, found)
        return found

    def open(self, current: Round, grid: Grid) -> Exchange:
        """Prepare this exchange, with the uploads that the log already holds; nothing is sent yet."""
        self._began = time.perf_counter()
        ledger, log = self.ledger, self.ledger.log
        payloads = self.payloads(current, self.method.dispatch(self.state, current))
        before = ledger.logged(current, payloads) if log is not None else []
        over = not payloads or (log is not None and log.is_over(current))
        spares: list[int] = []
        if self.settings.reassign or self.settings.hedge:
            free = sorted(set(self.available) - {payload.task.client for payload in payloads})
            order = stream(current.seed, "spares", current.number, current.exchange).permutation(len(free))
            spares = [free[i] for i in order]
        return Exchange(ledger, current, self.visit(current), grid, payloads, spares, before, over)

    def add_costs(self, exchange: Exchange) -> None:
        """Add the requests of `exchange` and its rejected replies to the report."""
        report = self.report
        report.clients += exchange.counts["requests"]
        report.spares += exchange.counts["spares"]
        report.bytes_down += exchange.counts["bytes"]
        report.rejected.update(exchange.rejected)

    def close(self, exchange: Exchange) -> None:
        """Record the costs of `exchange` and aggregate its uploads; average the global model after the last one."""
        ledger, report, current, payloads = self.ledger, self.report, exchange.current, exchange.payloads
        self.add_costs(exchange)
        if ledger.log is not None and not exchange.over:
            ledger.log.end(current)
        report.exchanges += bool(payloads)
        report.seconds_training += time.perf_counter() - self._began
        if isinstance(clock := self.clock, VirtualClock):
            seconds = [
                clock.seconds(
                    one.task.client, exchange.visit, one.nbytes + one.reply_nbytes, one.task.config.get("epochs")
                )
                for one in payloads.values()
            ]
            report.metrics["virtual_seconds"] = report.metrics.get("virtual_seconds", 0.0) + max(seconds, default=0.0)
        answered = len(exchange.won) > exchange.inherited
        if ledger.faults and payloads:
            asked = {payload.task.client for payload in payloads.values()}
            ledger.end_if_common(asked, current.number, len(self.available), answered=answered)
        ledger.heard = ledger.heard or answered
        overruled = self.finish(current, [exchange.won[slot] for slot in sorted(exchange.won)], payloads)
        if ledger.widths and len(self.method.widths(self.start.corners)) > 1:
            for task in sorted((one.task for one in payloads.values()), key=lambda one: one.width, reverse=True):
                report.width_replies[task.width.text] += task.slot in exchange.won and task.slot not in overruled
        if ledger.tell:
            tell_ends(exchange, overruled)

    def finish(
        self, current: Round, uploads: list[Upload], payloads: Mapping[int, Payload]
    ) -> dict[int, tuple[str, str]]:
        """Aggregate what the filters accept of `uploads`, if it is enough; return slot -> why others do not count."""
        started, ledger, report = time.perf_counter(), self.ledger, self.report
        refused: list[tuple[Upload, str, str]] = []
        for one in reversed(ledger.filters):
            verdict = one.judge(current, uploads, payloads)
            uploads = verdict.uploads
            refused += verdict.refused
            self._add_counts(verdict.counts)
        if len(uploads) < self.settings.min_replies:
            why = f"{len(uploads)} replies, federation.min_replies={self.settings.min_replies}"
            refused += [(upload, "too_few", why) for upload in uploads]
            uploads = []
        for upload, reason, detail in refused:
            ledger.reject(upload.client, UploadError(reason, detail), report.rejected)
        report.dropped += len(payloads) - len(uploads)
        self._measure(current, uploads)
        if ledger.tell:
            ledger.tell("uploads", {"round": current.number, "exchange": current.exchange, "uploads": uploads})
        report.metrics.update(self.method.aggregate(self.state, current, uploads))
        for upload in uploads:
            ledger.clients.accepted[upload.client] = self.visit(current)
        if current.exchange == self.exchanges - 1:
            self.end_round(current.number)
        report.seconds_aggregation += time.perf_counter() - started
        return {upload.slot: (reason, detail) for upload, reason, detail in refused}

    def _add_counts(self, counts: Mapping[str, float]) -> None:
        """Add what a filter has counted to the report."""
        for name, count in counts.items():
            if name in ("clipped", "lightened"):
                setattr(self.report, name, getattr(self.report, name) + int(count))
            else:
                self.report.metrics[name] = self.report.metrics.get(name, 0) + count

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
        return self.method.evaluation(self.state) if self.average is None else Evaluation([self.average.model])

    def checkpoint(self) -> Packed:
        """Return the whole state of the run; arrays are not copied."""
        filters = [one.state for one in self.ledger.filters]
        packed = pack(RunState(self.state, filters, self.ledger.clients, self.visits, self.average))
        if self.average is None:
            del packed.values["average"]
        spec = {name: [list(shape), dtype] for name, (shape, dtype) in self.start.spec.items()}
        packed.values |= {"model": spec, "parameters": list(self.start.parameters)}
        return packed

    def stray(self, reply: Message) -> None:
        """Take a reply that somebody else has pulled from the grid; only a run of visits can use one."""

    def saved(self) -> None:
        """Note that the checkpoint is on disk: clients may delete what no kept one needs."""
        if self._kept is not None:
            self._kept.append(dict(self.ledger.clients.accepted))
            if len(self._kept) == self._kept.maxlen:
                self.ledger.durable = self._kept[0]

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
