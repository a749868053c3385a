"""Observers that tell how a run goes: a bar or lines, JSON events, and loggers (TensorBoard, W&B, MLflow)."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from fedcross.core.errors import ConfigError, nearest, needed
from fedcross.core.events import emit, structured
from fedcross.core.files import close_own
from fedcross.server.observers import Observer

#: Columns of a terminal from which on there is a bar beside the numbers.
WIDE = 100


class PlainLines(Observer):
    """One plain line per evaluated round, for logs and pipes."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        self._title, self._total = f"{run['method']} {run['task']}", run["rounds"]

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        if entry["test_accuracy"] is not None:
            text = f"{self._title}  round {entry['round']}/{self._total}  {describe(entry)}"
            print(text, file=self._stream or sys.stdout, flush=True)


class Bar(Observer):
    """A live bar: round, accuracy, pool similarity, time left. A narrow terminal cuts the state."""

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = [TextColumn("[bold]{task.description}"), MofNCompleteColumn(), TextColumn("{task.fields[state]}")]
        self._bar = Progress(*columns, TimeRemainingColumn())
        if self._bar.console.width >= WIDE:
            self._bar.columns = (columns[0], BarColumn(bar_width=24), *self._bar.columns[1:])
        self._room = max(self._bar.console.width - 75, 0)
        title = f"{run['method']} {run['task']}"
        self._task = self._bar.add_task(title, total=run["rounds"], completed=run["after_round"], state="")
        self._bar.start()

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        if entry["test_accuracy"] is not None:
            self._bar.update(self._task, state=describe(entry)[: self._room])
        self._bar.update(self._task, completed=entry["round"])

    def run_ended(self, result: Mapping[str, Any] | None, error: BaseException | None = None) -> None:
        self._bar.stop()


def describe(entry: Mapping[str, Any]) -> str:
    """Return accuracy, pool similarity and the number of lost clients as a short text."""
    words = [f"accuracy {100 * entry['test_accuracy']:.2f} %"]
    if entry.get("pool_similarity_mean") is not None:
        words.append(f"pool similarity {entry['pool_similarity_mean']:.3f}")
    if entry["dropped"]:
        words.append(f"{entry['dropped']} of {entry['clients']} clients lost")
    return "  ".join(words)


def progress(stream: TextIO | None = None) -> Observer:
    """Return a bar in a terminal, lines elsewhere, nothing if the log is structured."""
    if structured():
        return Observer()
    return Bar() if (stream or sys.stdout).isatty() else PlainLines(stream)


class Events(Observer):
    """Writes one JSON line per event (:data:`core.events.EVENTS`), for ``log.format=json``."""

    watches = frozenset({"events"})

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        self._run, self._rounds = run["run"], run["after_round"]
        emit("run_started", **run)

    def request(self, event: str, fields: Mapping[str, Any]) -> None:
        emit(event, **fields)

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        self._rounds = entry["round"]
        emit("round_finished", **entry)

    def checkpoint_written(self, number: int, seconds: float) -> None:
        emit("checkpoint_written", round=number, seconds=round(seconds, 4))

    def run_ended(self, result: Mapping[str, Any] | None, error: BaseException | None = None) -> None:
        if result is not None:
            scores = {name: result[name] for name in ("rounds", "final_accuracy", "best_accuracy")}
            emit("run_finished", run=self._run, **scores, audit_sha256=(result.get("audit") or {}).get("sha256"))
        elif error is None:
            emit("run_stopped", run=self._run, rounds=self._rounds)


class Logger(Observer):
    """Logs the run in `folder`; `settings` are those of the group ``logger``, `config` the run's by dotted name."""

    def __init__(self, settings: Mapping[str, Any], folder: Path, config: Mapping[str, Any]) -> None:
        self._settings, self._folder, self._config = settings, folder, config


class TensorBoard(Logger):
    """Writes an event file into the run's folder; rounds that a resumed run repeats are purged."""

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(self._folder))
        for path in self._folder.glob("events.out.tfevents.*"):
            close_own(path)
        if run["after_round"]:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=run["after_round"] + 1, session_log=start))

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers(entry).items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(step=entry["round"], wall_time=time.time(), summary=summary))

    def run_ended(self, result: Mapping[str, Any] | None, error: BaseException | None = None) -> None:
        self._writer.close()


class WeightsAndBiases(Logger):
    """Logs to a Weights & Biases run named like the folder; a resumed run goes on with the same one."""

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        where = {
            name: self._settings.get(name, usual) for name, usual in {"project": "fedcross", "mode": "offline"}.items()
        }
        own = {"dir": str(self._folder), "name": self._folder.name, "config": dict(self._config)}
        wandb: Any = needed("wandb", "wandb", "logger=wandb")
        self._run = wandb.init(id=run["run"], resume="allow", **where, **own)

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        self._run.log(numbers(entry), step=entry["round"])

    def run_ended(self, result: Mapping[str, Any] | None, error: BaseException | None = None) -> None:
        self._run.finish(exit_code=int(error is not None))


class MLflow(Logger):
    """Logs to an MLflow run named like the folder; the file ``mlflow-run`` holds its id for a resumed run."""

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        tracking: Any = needed("mlflow.tracking", "mlflow", "logger=mlflow")
        uri, name = str(self._settings.get("uri", "mlruns")), str(self._settings.get("experiment", "fedcross"))
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the slim package has no database
        self._client = tracking.MlflowClient(uri if ":" in uri else Path(uri).resolve().as_uri())
        known = self._folder / "mlflow-run"
        if known.exists():
            self._id = known.read_text(encoding="utf-8").strip()
            return
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        tags = {"fedcross.run": run["run"]}
        self._id = self._client.create_run(experiment, tags=tags, run_name=self._folder.name).info.run_id
        known.write_text(self._id)
        for key, value in self._config.items():
            self._client.log_param(self._id, key, value)

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        for name, value in numbers(entry).items():
            self._client.log_metric(self._id, name, value, step=entry["round"])

    def run_ended(self, result: Mapping[str, Any] | None, error: BaseException | None = None) -> None:
        self._client.set_terminated(self._id, "FINISHED" if error is None else "FAILED")


LOGGERS: dict[str, Any] = {
    "none": lambda *_: Observer(), "tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow,
}  # fmt: skip


def numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of one line of metrics, without the round."""
    return {name: float(value) for name, value in entry.items() if isinstance(value, int | float) and name != "round"}


def open_logger(settings: Mapping[str, Any], folder: Path, config: Mapping[str, Any]) -> Observer:
    """Return the logger that ``settings["name"]`` names; `config` are the run's settings by dotted name."""
    name = str(settings["name"])
    if name not in LOGGERS:
        raise ConfigError(f"logger.name={name!r}: {nearest(name, list(LOGGERS))}")
    found: Observer = LOGGERS[name](settings, folder, config)
    return found
