"""The Python API: run a configuration, run a sweep, open an earlier run. Settings are those of the command line.

::

    import fedcross

    run = fedcross.run("method=fedcross", "task=digits", "rounds=20")
    run.result["best_accuracy"], run.metrics["test_accuracy"], run.model, run.folder
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcross.conf.compose import compose
from fedcross.core.errors import ConfigError, StorageError, counted
from fedcross.core.events import log_format
from fedcross.server.command_line import checked_plan, read_plan, single
from fedcross.server.export import network
from fedcross.server.run_folder import saved_overrides, unused
from fedcross.server.sweep import job_name, sweep_job

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn


@dataclass(frozen=True)
class Run:
    """A run on disk: its `folder` (docs/tutorial-first.md), and where the data sets lie that :attr:`model` needs."""

    folder: Path
    data_root: str | None = None

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """The metrics: a row for each round on disk, columns as in ``metrics.jsonl``, NaN where there is no value."""
        import pandas as pd

        try:
            lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            return pd.DataFrame([json.loads(line) for line in lines])
        except (OSError, ValueError) as error:
            raise StorageError(f"{self.folder}: no readable metrics.jsonl ({error}). Name a run's folder.") from error

    @cached_property
    def result(self) -> dict[str, Any]:
        """``result.json``: accuracies, bytes, seconds, versions; a StorageError if the run has not finished."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "result.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StorageError(f"{self.folder}: no readable result.json, the run is not finished ({error}).") from error
        return found

    @cached_property
    def model(self) -> nn.Module:
        """The global model with its final weights, an ``nn.Module`` on the CPU in evaluation mode."""
        return network(self.folder, self.data_root)

    def slice(self, width: float | str) -> nn.Module:
        """Return the global model of `width`, as 0.4 or ``"0.4@2"`` (two whole groups), as :attr:`model` does."""
        return network(self.folder, self.data_root, width)

    def __repr__(self) -> str:
        try:
            accuracy, state = self.result["final_accuracy"], counted(self.result["rounds"], "round")
            state += "" if accuracy is None else f", final accuracy {accuracy:.4f}"
        except StorageError:
            state = "has not ended"
        return f"Run({str(self.folder)!r}: {state})"


def run(*overrides: str) -> Run:
    """Run one configuration and return the finished run.

    `overrides` are settings in Hydra's grammar, as on the command line: ``"method=fedcross"``, ``"resume=FOLDER"``. An
    interrupt (Ctrl-C, a notebook's stop button) raises ``KeyboardInterrupt``; the finished rounds stay on disk. A
    ConfigError lists all errors of the configuration, before anything is written.
    """
    plan = read_plan(_texts(overrides))
    if plan.multirun:
        raise ConfigError("fedcross.run: these settings describe several runs (a sweep). Use fedcross.sweep.")
    with log_format("text"):  # log.format=json ends with the run
        folder = single(plan.overrides)
    return _opened(folder, overrides)


class Sweep(list[Run]):
    """The runs of a sweep, in its order."""

    @property
    def metrics(self) -> pd.DataFrame:
        """One tidy frame: a row for each round of each run, with the settings in which the runs differ as columns."""
        import pandas as pd

        settings = pd.json_normalize([compose(saved_overrides(run.folder)) for run in self])
        differing = settings.loc[:, settings.astype(str).nunique() > 1].drop(columns="output", errors="ignore")
        parts = [run.metrics.assign(**{str(k): v for k, v in differing.iloc[i].items()}) for i, run in enumerate(self)]
        return pd.concat(parts, ignore_index=True)


def sweep(*overrides: str) -> Sweep:
    """Run every combination of the given settings, one after another, and return the runs in that order.

    `overrides` are as for :func:`run`, with several values: ``"method=fedavg,fedcross"``, ``"seed=1,2,3"``;
    ``"hydra.sweep.dir=DIR"`` sets the folder of the sweep; an interrupted sweep in it continues. A ConfigError lists
    the errors of all combinations, before the first run starts.
    """
    plan = checked_plan(["-m", *_texts(overrides)])
    if plan.search:
        raise ConfigError("fedcross.sweep: a search runs on the command line: fedcross -m hydra/sweeper=optuna ...")
    named = any(o.startswith("hydra.sweep.dir=") for o in overrides)
    # Hydra remembers the time of its first composition, so it would name one folder for all sweeps of a process.
    root = plan.folder if named and plan.folder else unused(Path(time.strftime("multirun/%Y-%m-%d/%H-%M-%S")))
    found = Sweep()
    for job in plan.jobs:
        folder = (root / job_name(job)).resolve()
        sweep_job(job, folder)
        found.append(_opened(folder, job))
    return found


def load(folder: str | Path, data_root: str | None = None) -> Run:
    """Return the run in `folder`, finished or not; a StorageError if it holds none."""
    path = Path(folder)
    if not (path / "metrics.jsonl").is_file():
        raise StorageError(f"{path}: no metrics.jsonl here. Name the folder of a run.")
    return Run(path.resolve(), data_root)


def _texts(overrides: Sequence[str]) -> list[str]:
    if wrong := [o for o in overrides if not isinstance(o, str)]:
        raise ConfigError(f'{wrong[0]!r}: a setting is text. Write "rounds=5".')
    return list(overrides)


def _opened(folder: Path, overrides: Sequence[str]) -> Run:
    root = [o.removeprefix("data_root=").strip("'\"") for o in overrides if o.startswith("data_root=")]
    return Run(folder, root[-1] if root else None)
