"""Sends the scalars of a run to live viewers. One class per name in ``conf/logger``."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from fedcross.core.errors import ConfigError, StorageError, nearest
from fedcross.core.extras import install
from fedcross.core.private_files import close_own

#: TensorBoard's files in a run's folder.
EVENTS = "events.out.tfevents.*"


class Scalars(Protocol):
    """Receives every line of ``metrics.jsonl``."""

    def add(self, entry: Mapping[str, Any]) -> None:
        """Record one round."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


class Silent:
    """Records nothing."""

    def add(self, entry: Mapping[str, Any]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class TensorBoard:
    """Writes TensorBoard event files into the run's folder."""

    def __init__(self, folder: Path, purge_from: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        before = set(folder.glob(EVENTS))
        self._writer = EventFileWriter(str(folder))  # has made its file
        for path in set(folder.glob(EVENTS)) - before:
            close_own(path)
        if purge_from > 1:
            from tensorboard.compat.proto.event_pb2 import SessionLog

            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(step=purge_from, session_log=start))

    def add(self, entry: Mapping[str, Any]) -> None:
        """Record every number of one round under its own name."""
        import time

        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers(entry).items()]
        event = self._event(step=entry["round"], wall_time=time.time(), summary=self._summary(value=values))
        self._writer.add_event(event)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WeightsAndBiases:
    """Logs to a Weights & Biases run named like the run's folder. A continued run continues the same one."""

    def __init__(self, settings: Mapping[str, Any], folder: Path, run: str, config: Mapping[str, Any]) -> None:
        wandb = _library("wandb", "wandb")
        self._run = wandb.init(
            project=settings.get("project", "fedcross"),
            mode=settings.get("mode", "offline"),
            dir=str(folder),
            name=folder.name,
            id=run,
            resume="allow",
            config=dict(config),
        )

    def add(self, entry: Mapping[str, Any]) -> None:
        """Record every number of one round under its own name."""
        self._run.log(numbers(entry), step=entry["round"])

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow:
    """Logs to an MLflow run named like the run's folder.

    A continued run continues the same one: the file ``mlflow-run`` holds its id.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path, run: str, config: Mapping[str, Any]) -> None:
        tracking = _library("mlflow.tracking", "mlflow")
        uri = str(settings.get("uri", "mlruns"))
        # Newer versions ask for a database for local runs. The slim package has none; its file store suffices.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        self._client = tracking.MlflowClient(uri if ":" in uri else Path(uri).resolve().as_uri())
        known = folder / "mlflow-run"
        if known.exists():
            try:
                self._id = known.read_text(encoding="utf-8").strip()
            except (OSError, ValueError) as error:
                raise StorageError(f"{known}: cannot be read ({error}). Delete it: MLflow gets a new run.") from error
            return
        name = str(settings.get("experiment", "fedcross"))
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found is not None else self._client.create_experiment(name)
        self._id = self._client.create_run(experiment, tags={"fedcross.run": run}, run_name=folder.name).info.run_id
        known.write_text(self._id)
        for key, value in config.items():
            self._client.log_param(self._id, key, value)

    def add(self, entry: Mapping[str, Any]) -> None:
        """Record every number of one round under its own name."""
        for name, value in numbers(entry).items():
            self._client.log_metric(self._id, name, value, step=entry["round"])

    def close(self) -> None:
        """Mark the run as finished."""
        self._client.set_terminated(self._id)


def numbers(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of one line of metrics, without the round number."""
    return {name: float(value) for name, value in entry.items() if isinstance(value, int | float) and name != "round"}


def _library(module: str, extra: str) -> Any:
    """Import an optional library.

    Raises
    ------
    ConfigError
        If it is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"logger={extra}: the library is not installed ({error}). {install(extra)}") from error


def open_logger(
    settings: Mapping[str, Any], folder: Path, first_round: int, run: str = "", config: Mapping[str, Any] | None = None
) -> Scalars:
    """Return the logger that ``settings["name"]`` names.

    Parameters
    ----------
    settings : mapping
        The configuration group ``logger``.
    folder : Path
        The run's folder.
    first_round : int
        The next round; entries that an interrupted run logged for it or later rounds are discarded.
    run : str
        The run's identity, the same after a resume.
    config : mapping
        Settings of the run by dotted name; some viewers show them.

    Raises
    ------
    ConfigError
        If the logger's library is not installed, or there is no such logger.
    """
    name = str(settings["name"])
    if name == "none":
        return Silent()
    if name == "tensorboard":
        return TensorBoard(folder, first_round)
    kinds: dict[str, Callable[..., Scalars]] = {"wandb": WeightsAndBiases, "mlflow": MLflow}
    if name not in kinds:
        raise ConfigError(f"logger.name={name!r}: {nearest(name, ['none', 'tensorboard', *kinds])}")
    return kinds[name](settings, folder, run, config or {})
