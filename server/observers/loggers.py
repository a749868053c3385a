"""Loggers: send the numbers of every round to TensorBoard, Weights & Biases or MLflow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcross.core.errors import ConfigError, StorageError, nearest
from fedcross.core.extras import needed
from fedcross.core.private_files import close_own
from fedcross.server.observers import Observer

#: TensorBoard's files in a run's folder.
EVENTS = "events.out.tfevents.*"


class TensorBoard(Observer):
    """Writes an event file into the run's folder; rounds that a resumed run repeats are purged."""

    def __init__(self, settings: Mapping[str, Any], folder: Path, config: Mapping[str, Any]) -> None:
        self._folder = folder

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        """Open a new event file."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        before = set(self._folder.glob(EVENTS))
        self._writer = EventFileWriter(str(self._folder))
        for path in set(self._folder.glob(EVENTS)) - before:
            close_own(path)
        if run["after_round"]:
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=run["after_round"] + 1, session_log=start))

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        """Record the round as one event."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers(entry).items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(step=entry["round"], wall_time=time.time(), summary=summary))

    def run_ended(self, result: Mapping[str, Any] | None, error: BaseException | None = None) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WeightsAndBiases(Observer):
    """Logs to a Weights & Biases run named like the folder; a resumed run goes on with the same one."""

    def __init__(self, settings: Mapping[str, Any], folder: Path, config: Mapping[str, Any]) -> None:
        self._wandb: Any = needed("wandb", "wandb", "logger=wandb")
        self._settings, self._folder, self._config = settings, folder, config

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        """Start or continue the run."""
        self._run = self._wandb.init(
            project=self._settings.get("project", "fedcross"),
            mode=self._settings.get("mode", "offline"),
            dir=str(self._folder),
            name=self._folder.name,
            id=run["run"],
            resume="allow",
            config=dict(self._config),
        )

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        """Log the round."""
        self._run.log(numbers(entry), step=entry["round"])

    def run_ended(self, result: Mapping[str, Any] | None, error: BaseException | None = None) -> None:
        """Finish the run."""
        self._run.finish(exit_code=int(error is not None))


class MLflow(Observer):
    """Logs to an MLflow run named like the folder; the file ``mlflow-run`` holds its id for a resumed run."""

    def __init__(self, settings: Mapping[str, Any], folder: Path, config: Mapping[str, Any]) -> None:
        tracking: Any = needed("mlflow.tracking", "mlflow", "logger=mlflow")
        uri = str(settings.get("uri", "mlruns"))
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # the slim package has no database
        self._client = tracking.MlflowClient(uri if ":" in uri else Path(uri).resolve().as_uri())
        self._experiment, self._folder, self._config = str(settings.get("experiment", "fedcross")), folder, config

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        """Start or continue the run."""
        known = self._folder / "mlflow-run"
        if known.exists():
            try:
                self._id = known.read_text(encoding="utf-8").strip()
            except (OSError, ValueError) as error:
                raise StorageError(
                    f"{known}: cannot be read ({error}). Delete it to start a new MLflow run."
                ) from error
            return
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(self._experiment)
        tags = {"fedcross.run": run["run"]}
        self._id = self._client.create_run(experiment, tags=tags, run_name=self._folder.name).info.run_id
        known.write_text(self._id)
        for key, value in self._config.items():
            self._client.log_param(self._id, key, value)

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        """Log the round."""
        for name, value in numbers(entry).items():
            self._client.log_metric(self._id, name, value, step=entry["round"])

    def run_ended(self, result: Mapping[str, Any] | None, error: BaseException | None = None) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id, "FINISHED" if error is None else "FAILED")


LOGGERS: dict[str, type[Observer]] = {
    "none": Observer, "tensorboard": TensorBoard, "wandb": WeightsAndBiases, "mlflow": MLflow,
}  # fmt: skip


def numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of one line of metrics, without the round."""
    return {name: float(value) for name, value in entry.items() if isinstance(value, int | float) and name != "round"}


def open_logger(settings: Mapping[str, Any], folder: Path, config: Mapping[str, Any]) -> Observer:
    """Return the logger that ``settings["name"]`` names; `config` are the run's settings by dotted name.

    Raises
    ------
    ConfigError
        If there is no such logger, or its library is not installed.
    """
    name = str(settings["name"])
    if name not in LOGGERS:
        raise ConfigError(f"logger.name={name!r}: {nearest(name, list(LOGGERS))}")
    return Observer() if name == "none" else LOGGERS[name](settings, folder, config)  # type: ignore[call-arg]
