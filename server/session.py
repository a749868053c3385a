"""The server's part of a run: rounds, evaluation, metrics, checkpoints."""

from __future__ import annotations

import math
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common.logger import log
from flwr.serverapp import Grid

from fedcross.client.device import gpu_name, pick_device, set_arithmetic
from fedcross.conf.schema import RunConfig
from fedcross.core import machine
from fedcross.core.errors import FederationError, StorageError, remedy
from fedcross.core.events import emit, structured
from fedcross.core.interrupts import watched
from fedcross.core.strict_json import dumps
from fedcross.engines.judged import judged
from fedcross.server import accounting, arrangements
from fedcross.server.audit import Audit, Head
from fedcross.server.checkpoint import Checkpoints, resume
from fedcross.server.evaluation import Evaluator, across_clients
from fedcross.server.identity import (
    changes,
    check_base,
    check_continues,
    check_data,
    describe,
    digest_of_settings,
    digests_of,
    flatten,
    rules_of,
    without_places,
)
from fedcross.server.loggers import open_logger
from fedcross.server.model_file import write_model
from fedcross.server.progress import Progress
from fedcross.server.reply_log import WriteAheadLog
from fedcross.server.request_log import RequestLog
from fedcross.server.run_folder import anew, folder_of, prepare, refuse_keys, refuse_used
from fedcross.server.serving import board_of, page_of
from fedcross.server.slices import plan_for, prepare_slices
from fedcross.server.snapshots import Snapshots
from fedcross.server.visit_ledger import VisitLedger
from fedcross.strategies.round.base import Method
from fedcross.strategies.round.clock import clock_of
from fedcross.strategies.round.federation import RoundReport
from fedcross.strategies.round.registry import method_class
from fedcross.tasks.models.weights import arrays_of, tied, trainable
from fedcross.tasks.scoring import Score

#: Reasons for which replies are rejected where clients train with a learning rate that is too large.
DIVERGED = ("non_finite", "bad_metrics")
#: Settings of methods for how far the server itself moves the model, or what it sends.
STEPS = ("server_lr", "host_lr", "radius")
#: After so many rounds, one after another, with slots of a width but no accepted reply, a run says so.
IDLE_ROUNDS = 10


class Session:
    """Runs `config` with the clients of `grid`.

    Parameters
    ----------
    config : RunConfig
        The checked configuration; ``output`` names the run's folder.
    grid : Grid
        Sends messages to the clients.
    progress : Progress
        Shows every finished round.
    folder : Path, optional
        The run's folder, which the caller has decided on; the one that `config` says if None.
    """

    def __init__(self, config: RunConfig, grid: Grid, progress: Progress, folder: Path | None = None) -> None:
        self.config = config
        self.grid = grid = judged(grid)
        self.progress = progress
        self.folder = prepare(folder or folder_of(config))
        if config.resume is None:
            refuse_used(self.folder)
        else:
            refuse_keys(self.folder, "resume")
        self.checkpoints = Checkpoints(self.folder, config.checkpoint.keep, config.checkpoint.milestone)
        self.snapshots = Snapshots(self.folder, config.snapshots.rounds)
        self.device = pick_device(config.device)
        set_arithmetic(self.device, config.train)
        kind = method_class(config.modules["method"])
        data = config.load_data()
        model, self.base = config.network(data.task)
        self.evaluator = Evaluator(kind.evaluation_network(model, config.method), data, self.device)
        self._last_score: Score | None = None
        self._doubted = False
        self._idle_told: set[str] = set()  # widths without accepted replies of which the log has said so
        self.done, self.run = 0, secrets.token_hex(8)
        self.described = describe(config)  # once: a record of visits that is repeated may be gone or grow meanwhile
        self.data = digests_of(config, data)
        self.changes: list[dict[str, Any]] = []
        state, head = None, None
        if config.resume is not None:
            self.done, state, identity = self.checkpoints.latest()
            check_continues(identity, config)
            check_base(identity, self.base)
            check_data(identity.get("data"), self.data)
            self.data = identity.get("data", {}) | self.data  # a server may have its test examples alone
            self.changes = changes(identity, config, self.done)
            self.run, head = identity["run"], Head.of(identity.get("audit"))
        self.method: Method = kind(
            config.method, arrangements.federation_of(config, self.run, arrangements.networked(config, grid))
        )
        self.method.clock = clock_of(
            config.clock,
            config.devices,
            config.seed,
            arrangements.examples_of(data, config.train.examples),
            config.train.epochs,
            kind.asynchronous,
        )
        arrangements.tell_replayed(config)
        plan = plan_for(config, model, data.task)
        prepare_slices(self.method, config, plan, 0 if data.partition.own else len(data.partition))
        self.evaluator.plan = plan
        self.method.durable = {}
        self._accepted: deque[dict[int, int]] = deque(maxlen=config.checkpoint.keep)
        self.method.begin(arrays_of(model), trainable(model))
        self.method.tied, self.method.base = tied(self.evaluator.model), self.base
        if state is None and self.method.independent_models:
            self.method.start_from(arrangements.independent(config, data.task, self.method.independent_models))
        if state is not None:
            resume(self.method, state, self.checkpoints.path(self.done))
        self.method.local_due = lambda number: config.evaluate_local and self._due(number)
        self.method.observer = self.snapshots.uploads if self.snapshots.rounds else None
        self.reply_log = (
            WriteAheadLog(self.folder, self.run, self.done) if arrangements.logs_replies(config, grid) else None
        )
        self.method.log = self.reply_log
        self.audit: Audit | None = None
        if head is not None or arrangements.audited(config, grid):  # a chain that was begun goes on
            self.audit = Audit(self.folder, self.run, digest_of_settings(config), head, self.done)
            self.method.on_ended = self._note
        self.request_log: RequestLog | None = None
        if config.privacy.enabled:
            self.request_log = RequestLog(self.folder, None if state is None else self.method.requests)
            self.method.on_request = self.request_log.add
        self.board = board_of(config)
        if structured() or self.board is not None:
            self.method.tell = self._tell
        self.visits: VisitLedger | None = None
        if kind.asynchronous:
            ended = 0 if state is None else int(state.values["_visits"]["finished"])
            self.visits = VisitLedger(self.folder, self.done, ended)
            self.method.on_visit = self.visits.add

    def execute(self) -> dict[str, Any]:
        """Run the remaining rounds as :meth:`_execute` does, with a live page if the run has one."""
        if self.board is None:
            return self._execute()
        with page_of(self.board, self.config, self.folder):
            return self._execute()

    def _execute(self) -> dict[str, Any]:
        """Run the remaining rounds and return the content of ``result.json``; a crash keeps finished rounds.

        If ``stop_at`` ends the run before its last round, the content is empty and no ``result.json`` is written.
        """
        config = self.config
        last = min(config.rounds, config.stop_at or config.rounds)
        ledger = accounting.Ledger(self.folder, self.done)
        shown = flatten(self.described)
        logger = open_logger(config.logger.model_dump(), self.folder, self.done + 1, self.run, shown)
        self._tell_start()
        if self.board is not None:
            self.board.recall(ledger.lines)
        if self.reply_log is not None and config.resume is None:
            self._checkpoint(0)  # the log of the first rounds needs a checkpoint to follow
        self.progress.start(f"{config.names['method']} {config.names['task']}", self.done, config.rounds)
        try:
            with watched() as interrupted:
                for number in range(self.done + 1, last + 1):
                    entry = self._round(number)
                    if self.audit is not None:
                        self.audit.flush()
                    ledger.add(entry)
                    self._tell("round_finished", entry)
                    self._doubt(entry)
                    self._tell_idle(ledger.lines)
                    if number % config.checkpoint.every == 0 or number == last:
                        self._checkpoint(number)
                    logger.add(entry)
                    self.progress.round(entry)
                    if interrupted.is_set():
                        raise KeyboardInterrupt
        finally:
            self.progress.stop()
            ledger.close()
            logger.close()
            if self.audit is not None:
                self.audit.close()
            if self.visits is not None:
                self.visits.close()
            if self.reply_log is not None:
                self.reply_log.close()
        if last == config.rounds:  # one that was to stop before may train in the rounds that are left
            replayed = config.clock.name == "replay"
            accounting.refuse_idle(ledger.lines, anew(self.folder), replayed=replayed)
        result = self._finish(ledger) if last == config.rounds else {}
        self._tell_end(result, last)
        return result

    def _tell_start(self) -> None:
        config = self.config
        names = {group: config.names[group] for group in ("method", "task", "engine")}
        plan = {"seed": config.seed, "rounds": config.rounds, "clients_per_round": config.clients_per_round}
        run = {"run": self.run, "folder": str(self.folder), **names, **plan, "after_round": self.done}
        self._tell("run_started", run)

    def _tell_end(self, result: dict[str, Any], last: int) -> None:
        if not result:
            self._tell("run_stopped", {"run": self.run, "rounds": max(last, self.done)})
            return
        scores = {name: result[name] for name in ("rounds", "final_accuracy", "best_accuracy")}
        trail = None if self.audit is None else self.audit.head.sha256
        self._tell("run_finished", {"run": self.run, **scores, "audit_sha256": trail})

    def _tell(self, event: str, fields: dict[str, Any]) -> None:
        """Pass an event on to the structured log and the live page."""
        emit(event, **fields)
        if self.board is not None:
            if (online := len(self.method.nodes.online)) or self.board.online is not None:
                self.board.online = online
            key = self.method.nodes.keys.get(fields["node"]) if event == "request_sent" else None
            self.board.note(event, {**fields, "key": key} if key else fields)

    def _round(self, number: int) -> dict[str, Any]:
        started = time.perf_counter()
        report = self.method.run_round(number, self.grid)
        if self.visits is not None:
            self.visits.flush()
        if number in self.snapshots.rounds:
            self.snapshots.model(number, self.method.global_model())
        score: Score | None = None
        widths: dict[str, Any] = {}
        if self._due(number):
            score, widths = self._evaluated()
            self._last_score = score
            self._refuse_ruined(number, score)
        entry = line(report, score, time.perf_counter() - started) | widths
        if score is not None and self.config.evaluate_clients:
            entry |= across_clients(self.method, self.grid, number)
        return entry

    def _due(self, number: int) -> bool:
        """Return whether round `number` is evaluated."""
        return number % self.config.evaluate_every == 0 or number == self.config.rounds

    def _evaluated(self) -> tuple[Score | None, dict[str, Any]]:
        """Return the score of the global model and, where models have several sizes, ``width_accuracy`` of each."""
        models = self.method.slice_models() if self.method.plan is not None else {}
        if not models:
            return self.evaluator.score_of(self.method.evaluation_models()), {}
        scores = {size: self.evaluator.score(arrays, size) for size, arrays in models.items()}
        widths = {size.text: score.accuracy for size, score in scores.items()}
        return scores[self.method.global_size], {"width_accuracy": widths}

    def _refuse_ruined(self, number: int, score: Score | None) -> None:
        """Raise a FederationError if the global model computes nothing finite: no client can train it any more."""
        if score is not None and not math.isfinite(score.loss):
            raise FederationError(
                f"Round {number}: the test loss of the global model is {score.loss}, so no client can train it. What "
                "is not finite in a reply is rejected: a step of the server or of the clients grew too large, or a "
                f"client sent a huge update. Lower {self._rates()}{self._defence()}, and {anew(self.folder)}."
            )

    def _rates(self) -> str:
        """Return the settings that say how far server and clients go in a step."""
        own = [f"method.{name}" for name in STEPS if name in type(self.config.method).model_fields]
        return " or ".join([*own, "train.lr"])

    def _defence(self) -> str:
        """Return how to bound what a client sends, where that is possible and not done."""
        possible = self.method.defended and not self.method.asynchronous
        return ", or set defence.enabled=true" if possible and not self.config.defence.enabled else ""

    def _doubt(self, entry: Mapping[str, Any]) -> None:
        """Say once that the training diverges, where that is the most likely reason for rejected replies."""
        rejected = {reason: entry["rejected"].get(reason, 0) for reason in DIVERGED}
        count, asked = sum(rejected.values()), entry["clients"]
        if self._doubted or 2 * count <= asked:
            return
        self._doubted = True
        why = ", ".join(f"{reason} {times}" for reason, times in rejected.items() if times)
        advice = (
            f"The training diverges, most likely: lower {self._rates()}, or set train.clip. If it went well before, a "
            "device's reply may have ruined the model."
        )
        log(WARNING, f"fedcross: round {entry['round']}: {count} of {asked} replies rejected, {why}. {advice}")

    def _tell_idle(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Say once of a width that its slots go out and no reply for them is accepted."""
        for size, count in lines[-1].get("width_replies", {}).items():
            if count or size in self._idle_told:
                continue
            last = [line["width_replies"][size] for line in reversed(lines) if size in line.get("width_replies", {})]
            if len(last) < IDLE_ROUNDS or any(last[:IDLE_ROUNDS]):
                continue
            self._idle_told.add(size)
            log(
                WARNING,
                f"fedcross: round {lines[-1]['round']}: models of width {size} went out in {IDLE_ROUNDS} rounds and no "
                "reply was accepted, so what only they have is not trained, and their accuracy is of such a model. See "
                "`rejected` and the warnings above; look at the devices that can hold this width, or leave it out of "
                "method.widths.",
            )

    def _note(self, ended: dict[str, Any]) -> None:
        """Add a line on a request to the audit trail, with the key of its node where that is known."""
        if self.audit is not None:
            self.audit.add({**ended, "key": self.method.nodes.keys.get(ended["node"])})

    def _checkpoint(self, number: int) -> None:
        """Save round `number`; let clients delete the states that no kept checkpoint needs any more."""
        started = time.perf_counter()
        if self.audit is not None:
            self.audit.flush()  # the checkpoint names its last line
        self.checkpoints.save(number, self.method.checkpoint(), self._identity())
        self._tell("checkpoint_written", {"round": number, "seconds": round(time.perf_counter() - started, 4)})
        self._accepted.append(dict(self.method.accepted))
        if len(self._accepted) == self._accepted.maxlen:
            self.method.durable = self._accepted[0]
        if self.reply_log is not None:
            self.reply_log.restart(number)
            self.method.checkpointed()

    def _finish(self, ledger: accounting.Ledger) -> dict[str, Any]:
        names = self.config.names
        widths: dict[str, Any] = {}
        if self._last_score is None:  # the process before this one died between the last round and its result
            self._last_score, widths = self._evaluated()
        result = accounting.result(
            ledger.lines,
            {
                **{group: names[group] for group in ("method", "task", "model", "partition", "engine")},
                "seed": self.config.seed,
                "device": str(self.device),
                "machine": machine.described(gpu_name(self.device)),
                "defence": self.config.defence.model_dump() if self.config.defence.enabled else None,
                **({"data": self.data} if self.data else {}),
                **({"changes": self.changes} if self.changes else {}),
                **self._privacy(),
                "audit": None if self.audit is None else self.audit.head.plain(),
            },
            self._last_score,
            self.config.rounds,
            widths.get("width_accuracy"),
        )
        try:
            write_model(self.folder / "model.safetensors", self.method.evaluation_arrays(), self.method.tied)
            accounting.write_atomically(self.folder / "result.json", (dumps(result, indent=2) + "\n").encode())
        except OSError as error:
            raise StorageError(
                f"{self.folder}: the result cannot be written ({error}). To go on: {remedy(error)}, then resume."
            ) from error
        return result

    def _privacy(self) -> dict[str, Any]:
        """Return the ``privacy`` entry of ``result.json``; empty if privacy is off."""
        if self.request_log is None:
            return {}
        from fedcross.server.privacy import statement

        return {"privacy": statement(self.config.privacy, self.request_log.counts)}

    def _identity(self) -> dict[str, Any]:
        settings, module = without_places(self.described), self.config.modules["method"]
        identity: dict[str, Any] = {"run": self.run, "config": settings, "module": module}
        identity["rules"] = rules_of(self.config)
        if self.data:
            identity["data"] = self.data
        if self.changes:
            identity["changes"] = self.changes
        if self.audit is not None:
            identity["audit"] = self.audit.head.plain()
        if self.method.plan is not None and self.method.plan.scaled:
            identity["scaled"] = list(self.method.plan.scaled)
        return identity | ({"base": self.base} if self.base else {})


def line(report: RoundReport, score: Score | None, seconds: float) -> dict[str, Any]:
    """Return the ``metrics.jsonl`` object of one round."""
    return {
        "round": report.round,
        "test_accuracy": score.accuracy if score else None,
        "test_loss": score.loss if score and math.isfinite(score.loss) else None,
        "train_loss": report.train_loss,
        "clients": report.clients,
        "dropped": report.dropped,
        "rejected": dict(report.rejected),
        "clipped": report.clipped,
        "lightened": report.lightened,
        "spares": report.spares,
        "exchanges": report.exchanges,
        "bytes_down": report.bytes_down,
        "bytes_up": report.bytes_up,
        "seconds": seconds,
        "seconds_training": report.seconds_training,
        "seconds_aggregation": report.seconds_aggregation,
        **({"width_replies": dict(report.width_replies)} if report.width_replies else {}),
        **report.metrics,
    }
