"""The server's part of a run: rounds, evaluation, metrics, checkpoints, observers."""

from __future__ import annotations

import math
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid
from torch import nn

from fedcross.client.device import evaluation_batch, gpu_name, pick_device, set_arithmetic
from fedcross.conf.schema import RunConfig
from fedcross.core.errors import FederationError
from fedcross.core.events import EVENTS, structured
from fedcross.core.files import dumps, write_atomically
from fedcross.engines.network_grid import network_grid
from fedcross.server import identity, privacy
from fedcross.server.audit import Audit, Head
from fedcross.server.checkpoint import Checkpoints
from fedcross.server.evaluation import across_clients, write_model
from fedcross.server.interrupts import watched
from fedcross.server.live import LivePage
from fedcross.server.live.http import place
from fedcross.server.metrics import BYTES, Metrics, machine, refuse_idle, result_of, stopped
from fedcross.server.observers import Observer
from fedcross.server.observers.messages import Events, open_logger
from fedcross.server.observers.records import Requests, Snapshots, Visits
from fedcross.server.reply_log import WriteAheadLog
from fedcross.server.run_folder import folder_of, prepare, refuse_used, start_again, writing
from fedcross.server.run_setup import driver_of, networked
from fedcross.strategies.round.packing import DICT, Packed
from fedcross.tasks.models.weights import tied
from fedcross.tasks.models.width import FULL, Width
from fedcross.tasks.scoring import Evaluator, Score

#: Settings of methods for how far the server moves the model, or what it sends.
STEPS = ("server_lr", "host_lr", "radius")


class Session:
    """Runs `config` with the clients of `grid` in `folder`, by default its own; `progress` shows finished rounds."""

    def __init__(self, config: RunConfig, grid: Grid, progress: Observer, folder: Path | None = None) -> None:
        self.config, self.grid = config, network_grid(grid)
        self.folder = prepare(folder or folder_of(config))
        self.device = pick_device(config.device)
        set_arithmetic(self.device, config.train)
        data = config.load_data()
        network, self.base = config.network(data.task)
        self.data = identity.digests_of(config, data) | ({"base": self.base} if self.base else {})
        self.client_names = list(data.partition.names)
        self._stored = identity.stored(config)
        # What an earlier process left
        self.checkpoints = Checkpoints(self.folder, config.checkpoint.keep, config.checkpoint.milestone)
        self.done, self.run, self.changes = 0, secrets.token_hex(8), list[dict[str, Any]]()
        state, head = (None, None) if config.resume is None else self._resumed()
        if config.resume is None:
            refuse_used(self.folder)
        # What writes and watches
        remote = networked(config, grid)
        logs = remote if config.checkpoint.log == "auto" else config.checkpoint.log
        self.reply_log = WriteAheadLog(self.folder, self.run, self.done) if logs else None
        self.observers = [one for one in self._observers(progress, state, head, remote) if one is not None]
        self._started: list[Observer] = []  # those that must be told how the run ends
        # What runs the rounds
        self.driver = driver_of(
            config, self.run, data, network, networked=remote, log=self.reply_log, tell=self._request, base=self.base,
            watches={event for observer in self.observers for event in observer.watches},
            local_due=lambda number: config.evaluate_local and self._due(number),
        )  # fmt: skip
        if state is not None:
            self.checkpoints.restore(self.driver, state, self.done)
        # What evaluates
        evaluated = config.new_method().network(network, deployed=True)
        self.tied = tied(evaluated)

        def build(width: Width) -> nn.Module:
            narrow = self.driver.ledger.widths and width.ratio < 1
            return config.network(data.task, width=width)[0] if narrow else evaluated

        self.evaluator = Evaluator(build, data, self.device, evaluation_batch(self.device, math.prod(data.task.shape)))
        self._last_score: Score | None = None

    def _resumed(self) -> tuple[Packed, Head | None]:
        """Return the state of the newest checkpoint and the end of the audit trail; check that the run continues."""
        self.done, state, known = self.checkpoints.latest()
        identity.check_continues(known, self.config)
        identity.check_data(known.get("data"), self.data)
        self.data = known.get("data", {}) | self.data  # a server may have its test examples alone
        self.changes = identity.changes(known, self.config, self.done)
        self.run = known["run"]
        return state, Head.of(known.get("audit"))

    def _observers(
        self, progress: Observer, state: Packed | None, head: Head | None, remote: bool
    ) -> Iterator[Observer | None]:
        """Yield the observers of the run, in the order in which they are told; records come before displays."""
        config, folder = self.config, self.folder
        self.audit = self.requests = None
        if head is not None or (remote if config.log.audit == "auto" else config.log.audit):
            self.audit = Audit(folder, self.run, identity.digest_of_settings(config), head, self.done)
        if config.privacy.enabled:
            before = None if state is None else dict(state.values["clients"]["requests"].get(DICT, ()))
            self.requests = Requests(folder, None if before is None else Counter(before))
        self.metrics = Metrics(folder, self.done)
        yield from (self.audit, self.requests)
        if config.new_method().asynchronous:
            yield Visits(folder, self.done, 0 if state is None else int(state.values["visits"]["finished"]))
        if config.snapshots.rounds:
            yield Snapshots(folder, config.snapshots.rounds)
        yield self.metrics
        yield Events() if structured() else None
        yield LivePage(folder, address) if (address := place(config)) else None
        yield from (
            progress,
            open_logger(config.logger.model_dump(), folder, identity.flatten(identity.describe(config))),
        )

    def _request(self, event: str, fields: Mapping[str, Any]) -> None:
        """Pass an event on to the observers that watch it, with the key of its node where that is known."""
        if event in ("request_sent", "request_ended") and (key := self.driver.nodes.keys.get(fields["node"])):
            fields = {**fields, "key": key}
        if event == "round_started":
            fields = {**fields, "connected": len(self.driver.nodes.online)}
        kinds = {event, "events"} if event in EVENTS else {event}
        for observer in self.observers:
            if kinds & observer.watches:
                observer.request(event, fields)

    def execute(self) -> dict[str, Any] | None:
        """Run the remaining rounds; return the content of ``result.json``, or None if ``stop_at`` has ended the run."""
        result, problem = None, None
        try:
            result = self._execute()
        except BaseException as error:
            problem = error
            raise
        finally:
            if self.reply_log is not None:
                self.reply_log.close()
            for observer in self._started:
                observer.run_ended(result, problem)
        return result

    def _execute(self) -> dict[str, Any] | None:
        config, lines = self.config, self.metrics.lines
        last = min(config.rounds, config.stop_at or config.rounds)
        facts = {"run": self.run, "folder": str(self.folder), "after_round": self.done}
        facts |= {group: config.names[group] for group in ("method", "task", "engine")}
        facts |= {name: getattr(config, name) for name in ("seed", "rounds", "clients_per_round")}
        for observer in self.observers:
            observer.run_started(facts, lines)
            self._started.append(observer)
        if self.reply_log is not None and config.resume is None:
            self._checkpoint(0)  # the log of the first rounds needs a checkpoint to follow
        number, early = self.done, stopped(lines, config.stop)
        with watched() as interrupted:
            while number < last and not early:
                number += 1
                entry = self._round(number)
                for observer in self.observers:
                    observer.round_finished(entry)
                early = stopped(lines, config.stop)
                if number % config.checkpoint.every == 0 or number == last or early:
                    self._checkpoint(number)
                if interrupted.is_set():
                    raise KeyboardInterrupt
        if number < config.rounds and not early:
            return None
        refuse_idle(lines, self._rates(), start_again(self.folder))
        return self._finish(number, early)

    def _round(self, number: int) -> dict[str, Any]:
        """Run round `number` and return its line of ``metrics.jsonl``."""
        started = time.perf_counter()
        report = self.driver.run_round(number, self.grid)
        if number in self.config.snapshots.rounds:
            self._request("model", {"round": number, "model": self.driver.global_model()})
        score, columns = self.evaluator.evaluate(self.driver.evaluation()) if self._due(number) else (None, {})
        self._last_score = score
        self._refuse_ruined(number, score)
        names = ("train_loss", "clients", "dropped", "rejected", "clipped", "lightened", "spares", "exchanges", *BYTES)
        entry = {
            "round": number,
            "test_accuracy": score.accuracy if score else None,
            "test_loss": score.loss if score else None,
            **{name: getattr(report, name) for name in names},
            "seconds": time.perf_counter() - started,
            **{name: getattr(report, name) for name in ("seconds_training", "seconds_aggregation")},
            **({"width_replies": dict(report.width_replies)} if report.width_replies else {}),
            **report.metrics,
            **columns,
        }
        if score is not None and self.config.evaluate_clients:
            entry |= across_clients(self.driver, self.grid, number)
        return entry

    def _metrics(self) -> dict[str, float]:
        """Return metrics beside the accuracy of the model to deploy; none if the method has no score."""
        found = self.driver.evaluation()
        if not (found.models or found.widths):
            return {}
        size, arrays = next(iter(found.widths.items()), (FULL, self.driver.global_model()))
        return self.evaluator.metrics(arrays, size)

    def _due(self, number: int) -> bool:
        """Return whether round `number` is evaluated."""
        return number % self.config.evaluate_every == 0 or number == self.config.rounds

    def _refuse_ruined(self, number: int, score: Score | None) -> None:
        """Raise a FederationError if the global model computes nothing finite: no client can train it any more."""
        if score is None or math.isfinite(score.loss):
            return
        method = self.driver.method
        possible = method.comparable and not method.asynchronous and not self.config.defence.enabled
        defence = ", or set defence.enabled=true" if possible else ""
        raise FederationError(
            f"Round {number}: the test loss of the global model is {score.loss}, so no client can train it. A step was "
            f"too large, or an upload was huge. Lower {self._rates()}{defence}, and {start_again(self.folder)}."
        )

    def _rates(self) -> str:
        """Return the settings that say how far server and clients go in a step."""
        own = [f"method.{name}" for name in STEPS if name in type(self.config.method).model_fields]
        return " or ".join([*own, "train.lr"])

    def _checkpoint(self, number: int) -> None:
        """Save round `number`; let clients delete the states that no kept checkpoint needs any more."""
        started = time.perf_counter()
        self.checkpoints.save(number, self.driver.checkpoint(), self._identity())
        for observer in self.observers:
            observer.checkpoint_written(number, time.perf_counter() - started)
        if self.reply_log is not None:
            self.reply_log.restart(number)
        self.driver.saved()

    def _identity(self) -> dict[str, Any]:
        """Return what a checkpoint says of its run; see :func:`identity.check_continues`."""
        optional = {
            "rules": identity.rules_of(self.config),
            **{"data": self.data, "changes": self.changes, "tied": dict(self.tied)},
            "audit": self.audit and self.audit.head._asdict(),
        }
        return {"run": self.run, "config": self._stored, **{name: value for name, value in optional.items() if value}}

    def _finish(self, rounds: int, early: Mapping[str, Any] | None) -> dict[str, Any]:
        """Write the model and ``result.json`` after `rounds` rounds, and return its content."""
        config = self.config
        columns: dict[str, Any] = {}
        if self._last_score is None:  # the process before this one died between the last round and its result
            self._last_score, columns = self.evaluator.evaluate(self.driver.evaluation())
        optional = {
            **{"data": self.data, "changes": self.changes, "stopped": early, "client_names": self.client_names},
            "privacy": self.requests and privacy.statement(config.privacy, self.requests.counts),
        }
        facts: dict[str, Any] = {
            **{group: config.names[group] for group in ("method", "task", "model", "partition", "engine")},
            "seed": config.seed,
            "device": str(self.device),
            "machine": machine(gpu_name(self.device)),
            "defence": config.defence.model_dump() if config.defence.enabled else None,
            "audit": self.audit and self.audit.head._asdict(),
            "metrics": self._metrics(),
            **{name: value for name, value in optional.items() if value},
        }
        result = result_of(self.metrics.lines, facts, rounds, self._last_score, columns)
        with writing(self.folder / "result.json"):
            write_model(self.folder / "model.safetensors", self.driver.global_model(), self.tied)
            write_atomically(self.folder / "result.json", (dumps(result, indent=2) + "\n").encode())
        return result
