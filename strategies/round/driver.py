"""Runs the rounds of a method: draws clients, sends its tasks, hands it the uploads, keeps its state.

:func:`open_run` puts everything together that a run needs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedcross.core.errors import StorageError, UploadError
from fedcross.core.randomness import stream
from fedcross.strategies.method import Evaluation, Method, Round, Scalar, Start, Upload
from fedcross.strategies.round.clock import Clock, VirtualClock
from fedcross.strategies.round.exchange import Exchange
from fedcross.strategies.round.ledger import RoundReport
from fedcross.strategies.round.packing import Packed, pack, unpack
from fedcross.strategies.round.sender import ClientRecords, Sender
from fedcross.strategies.wire.protocol import Payload
from fedcross.strategies.wire.records import Arrays


@dataclass
class RunState:
    """Everything that a checkpoint holds: the method's state, the filters', what is known of clients, open visits."""

    method: Any
    filters: list[Any] = field(default_factory=list)
    clients: ClientRecords = field(default_factory=ClientRecords)
    visits: Any = None


class Driver:
    """Runs the rounds of one method.

    Parameters
    ----------
    method : Method
        Decides what is sent and what becomes of it.
    start : Start
        What it begins with.
    sender : Sender
        Makes requests and takes replies.
    clock : Clock, optional
        The virtual clock that says how long a round takes.
    local_due : callable
        Whether clients measure their local accuracy in a round; what they tell in another one is not used.
    keep : int, optional
        How many checkpoints are kept: clients keep the states that the oldest needs. None: only the newest state.

    Attributes
    ----------
    state
        The method's state.
    report : RoundReport
        Costs and metrics of the current round so far, or of the last one between rounds.
    """

    def __init__(
        self,
        method: Method,
        start: Start,
        sender: Sender,
        clock: Clock | None = None,
        local_due: Callable[[int], bool] = lambda _: True,
        keep: int | None = None,
    ) -> None:
        self.method, self.start, self.sender, self.clock, self.local_due = method, start, sender, clock, local_due
        self.settings, self.ledger, self.nodes = sender.settings, sender.ledger, sender.nodes
        self.exchanges = method.exchanges(start.clients_per_round)
        self.state: Any = method.init(start)
        pack(self.state)  # what cannot be stored is named before the first round
        self._kept: deque[dict[int, int]] | None = None if keep is None else deque(maxlen=keep)
        if keep is not None:
            sender.durable = {}
        self.sized = bool(method.widths(start.corners))
        self.available: list[int] = []
        self._began = 0.0

    @property
    def report(self) -> RoundReport:
        """Costs and metrics of the current round so far, or of the last one between rounds."""
        return self.ledger.report

    def run_round(self, number: int, grid: Grid, config: Mapping[str, Scalar] | None = None) -> RoundReport:
        """Run one global round with all its exchanges, and return its report.

        `config` are scalars for the clients, sent with every request.

        Raises
        ------
        FederationError
            If fewer clients are connected than a round needs.
        """
        self.sender.config = config or {}
        current = self.begin(number, grid)
        for index in range(self.exchanges):
            exchange = self.open(self.at(current, index), grid)
            exchange.carry_out()
            self.close(exchange)
        return self.report

    def begin(self, number: int, grid: Grid) -> Round:
        """Wait until enough clients are connected, start an empty report, draw the clients of round `number`."""
        self.ledger.begin(number)
        settings, log = self.settings, self.sender.log
        before = None if log is None else log.available(number)
        told = None if log is None or before is None else log.widths(number)
        if before is None or (self.sized and told is None):
            self.available = self._wait(grid)
            told = self.nodes.widths()
            if log is not None and before is None:
                log.draw(number, self.available, told if self.sized else None)
        drawn_from = self.available if before is None else before
        budgets = (
            {c: told.get(c, self.sender.budgets.get(c, 1.0)) for c in drawn_from}
            if self.sized and told is not None
            else {}
        )
        current = Round(
            number, 0, (), settings.seed, settings.rounds, settings.clients_per_round,
            count=min(settings.clients_per_round, len(drawn_from)), budgets=budgets,
        )  # fmt: skip
        clients = self.method.sample(self.state, current, drawn_from)
        if before is not None:
            self.available = self._wait(grid, clients)
        self.ledger.say("round_started", round=number, clients=list(clients))
        return replace(current, clients=clients)

    def _wait(self, grid: Grid, wanted: Collection[int] = ()) -> list[int]:
        settings = self.settings
        endless = settings.networked and settings.nonce and settings.min_clients is None
        return self.nodes.wait_for(grid, settings.needed, settings.wait_s, wanted, endless=endless)

    @staticmethod
    def at(current: Round, index: int) -> Round:
        """Return exchange number `index` of a round."""
        return replace(current, exchange=index)

    def open(self, current: Round, grid: Grid) -> Exchange:
        """Prepare this exchange, with the uploads that the log already holds; nothing is sent yet."""
        self._began = time.perf_counter()
        sender, report = self.sender, self.report
        payloads = sender.payloads(current, self.method.dispatch(self.state, current))
        before = sender.before(current, payloads) if sender.log is not None else []
        over = not payloads or (sender.log is not None and sender.log.is_over(current))
        won = {upload.slot for upload in before}
        asked = [payload.nbytes for payload in payloads if over or payload.task.slot in won]
        report.clients += len(asked)
        report.bytes_down += sum(asked)
        place = {"round": current.number, "exchange": current.exchange}
        return Exchange(current, grid, payloads, sender, place, self._spares(current, payloads), before, over)

    def _spares(self, current: Round, payloads: Sequence[Payload]) -> list[int]:
        """Return the clients that may take over a slot of this exchange, in a seeded order."""
        if not (self.settings.reassign or self.settings.hedge):
            return []
        free = sorted(set(self.available) - {payload.task.client for payload in payloads})
        order = stream(current.seed, "spares", current.number, current.exchange).permutation(len(free))
        return [free[i] for i in order]

    def close(self, exchange: Exchange) -> None:
        """Record the costs of `exchange` and aggregate its uploads."""
        report, current, payloads = self.report, exchange.current, exchange.payloads
        report.clients += exchange.counts["requests"]
        report.spares += exchange.counts["spares"]
        report.bytes_down += exchange.counts["bytes"]
        report.rejected.update(exchange.rejected)
        if self.sender.log is not None and not exchange.over:
            self.sender.log.end(current)
        report.exchanges += bool(payloads)
        report.seconds_training += time.perf_counter() - self._began
        if isinstance(self.clock, VirtualClock):
            seconds = (self._seconds(self.clock, current, payload) for payload in payloads.values())
            report.metrics["virtual_seconds"] = report.metrics.get("virtual_seconds", 0.0) + max(seconds, default=0.0)
        answered = len(exchange.won) > exchange.inherited
        asked = {payload.task.client for payload in payloads.values()}
        if payloads:
            self.ledger.end_if_common(asked, current.number, len(self.available), answered=answered)
        overruled = self.finish(current, [exchange.won[slot] for slot in sorted(exchange.won)], payloads)
        if self.sized and len(self.method.widths(self.start.corners)) > 1:
            for payload in sorted(payloads.values(), key=lambda one: one.task.width, reverse=True):
                accepted = payload.task.slot in exchange.won and payload.task.slot not in overruled
                report.width_replies[payload.task.width.text] += accepted
        exchange.trail.end(payloads, exchange.won, overruled)
        self.ledger.forget_digests()

    def _seconds(self, clock: VirtualClock, current: Round, payload: Payload) -> float:
        """Return how long a client takes for `payload` on the virtual clock."""
        epochs = int(payload.task.config.get("epochs", clock.epochs))
        nbytes = payload.nbytes + payload.reply_nbytes
        return clock.seconds(payload.task.client, self.sender.visit(current), nbytes, epochs)

    def finish(
        self, current: Round, uploads: list[Upload], payloads: Mapping[int, Payload]
    ) -> dict[int, tuple[str, str]]:
        """Aggregate what the filters accept of `uploads`, if it is enough; return slot -> why others do not count."""
        started, report = time.perf_counter(), self.report
        overruled: dict[int, tuple[str, str]] = {}
        for one in reversed(self.sender.filters):
            verdict = one.judge(current, uploads, payloads)
            uploads = verdict.uploads
            self.count(verdict.counts)
            self._overrule(verdict.refused, overruled)
        if len(uploads) < (fewest := self.settings.min_replies):
            why = f"{len(uploads)} replies, federation.min_replies={fewest}"
            self._overrule([(upload, "too_few", why) for upload in uploads], overruled)
            uploads = []
        report.dropped += len(payloads) - len(uploads)
        self.ledger.uploaded(uploads, local=self.local_due(current.number))
        self.ledger.say("uploads", round=current.number, exchange=current.exchange, uploads=uploads)
        report.metrics.update(self.method.aggregate(self.state, current, uploads))
        for upload in uploads:
            self.sender.clients.accepted[upload.client] = self.sender.visit(current)
        report.seconds_aggregation += time.perf_counter() - started
        return overruled

    def count(self, counts: Mapping[str, float]) -> None:
        """Add what a filter has counted to the report."""
        for name, count in counts.items():
            if name in ("clipped", "lightened"):
                setattr(self.report, name, getattr(self.report, name) + int(count))
            else:
                self.report.metrics[name] = self.report.metrics.get(name, 0) + count

    def _overrule(self, refused: Sequence[tuple[Upload, str, str]], overruled: dict[int, tuple[str, str]]) -> None:
        for upload, reason, detail in refused:
            overruled[upload.slot] = reason, detail
            self.ledger.rejected(upload.client, UploadError(reason, detail), self.report.rejected)

    # ---- models and checkpoints -----------------------------------------------------------------------------------

    def global_model(self) -> Arrays:
        """Return the model to evaluate and to deploy."""
        return self.method.global_model(self.state)

    def evaluation(self) -> Evaluation:
        """Return the models whose score is the round's."""
        return self.method.evaluation(self.state)

    def checkpoint(self) -> Packed:
        """Return the whole state of the run; arrays are not copied."""
        packed = pack(
            RunState(self.state, [one.state for one in self.sender.filters], self.sender.clients, self._visits())
        )
        spec = {name: [list(shape), dtype] for name, (shape, dtype) in self.start.spec.items()}
        packed.values |= {"model": spec, "parameters": list(self.start.parameters)}
        return packed

    def stray(self, reply: Message) -> None:
        """Take a reply that somebody else has pulled from the grid; only a run of visits can use one."""

    def saved(self) -> None:
        """Note that the checkpoint is on disk: clients may delete what no kept one needs."""
        if self._kept is not None:
            self._kept.append(dict(self.sender.clients.accepted))
            if len(self._kept) == self._kept.maxlen:
                self.sender.durable = self._kept[0]

    def restore(self, packed: Packed) -> None:
        """Continue from what :meth:`checkpoint` returned; a StorageError if it is of another model or method."""
        values = {name: value for name, value in packed.values.items() if name not in ("model", "parameters")}
        stored = {name: (tuple(shape), dtype) for name, (shape, dtype) in packed.values.get("model", {}).items()}
        if wrong := sorted(n for n in {*stored, *self.start.spec} if stored.get(n) != self.start.spec.get(n)):
            raise StorageError(
                f"the checkpoint's model has {wrong[0]!r} as {stored.get(wrong[0])}, this run's as "
                f"{self.start.spec.get(wrong[0])}. Continue with the model that the run began with."
            )
        fresh = RunState(self.state, [one.state for one in self.sender.filters], ClientRecords(), self._visits())
        found: RunState = unpack(Packed(packed.arrays, values), fresh)
        self.state, self.sender.clients = found.method, found.clients
        for one, state in zip(self.sender.filters, found.filters):
            one.state = state
        self._resume_visits(found.visits)
        for node in self.sender.clients.excluded:
            self.nodes.exclude(node)
        for node in self.sender.log.killers() if self.sender.log is not None else ():
            self.sender.exclude(node)

    def _visits(self) -> Any:
        """Return the visits that are under way, for a checkpoint."""
        return None

    def _resume_visits(self, visits: Any) -> None:
        """Continue these visits."""
