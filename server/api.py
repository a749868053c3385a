"""The Python API: run a configuration, run a sweep, open an earlier run. Settings are those of the command line.

::

    import fedcross

    run = fedcross.run("method=fedcross", "task=digits", "rounds=20")
    run.result["best_accuracy"], run.metrics["test_accuracy"], run.model, run.folder
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcross.core.errors import ConfigError, StorageError, counted

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn


@dataclass(frozen=True)
class Run:
    """A run on disk: one that this process has just finished, or an earlier one.

    Parameters
    ----------
    folder : Path
        The run's folder; docs/sweeps.md describes its files.
    data_root : str, optional
        Folder of the data sets, which :attr:`model` needs; default: as for the command.
    """

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
            raise StorageError(
                f"{self.folder}: no readable metrics.jsonl ({error}). Name the folder of a run."
            ) from error

    @cached_property
    def result(self) -> dict[str, Any]:
        """``result.json``: accuracies, bytes, seconds, versions.

        Raises
        ------
        StorageError
            If the run has not finished; :func:`fedcross.run` with ``resume=FOLDER`` continues it.
        """
        try:
            found: dict[str, Any] = json.loads((self.folder / "result.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StorageError(f"{self.folder}: no readable result.json, the run is not finished ({error}).") from error
        return found

    @cached_property
    def model(self) -> nn.Module:
        """The global model with its final weights, an ``nn.Module`` on the CPU in evaluation mode."""
        from fedcross.server.export import network

        return network(self.folder, self.data_root)

    def slice(self, width: float | str) -> nn.Module:
        """Return the global model of `width`, for runs whose models have several, as :attr:`model` does.

        A report's name of a size works too: ``"0.4@2"`` keeps the first two groups of channels whole.

        Raises
        ------
        StorageError
            If the run has no models of this width; the message lists those that it has.
        """
        from fedcross.server.export import network

        return network(self.folder, self.data_root, width)

    def __repr__(self) -> str:
        try:
            accuracy = self.result["final_accuracy"]
            state = (
                f"{counted(self.result['rounds'], 'round')}, final accuracy {accuracy:.4f}"
                if accuracy is not None
                else "ended"
            )
        except StorageError:
            state = "has not ended"
        return f"Run({str(self.folder)!r}: {state})"


def run(*overrides: str) -> Run:
    """Run one configuration and return the finished run.

    Parameters
    ----------
    *overrides : str
        Settings in Hydra's grammar, as on the command line: ``"method=fedcross"``, ``"rounds=20"``,
        ``"resume=FOLDER"``.

    Returns
    -------
    Run
        The run, with its metrics, result, model and folder.

    Raises
    ------
    ConfigError
        If the configuration has errors. The message lists all of them; nothing has been written yet.

    Notes
    -----
    Prints the progress. On an interrupt (Ctrl-C, a notebook's stop button), ends the worker processes and then raises
    ``KeyboardInterrupt``; the finished rounds stay on disk.
    """
    from fedcross.server.command_line import read_plan
    from fedcross.server.jobs import single

    plan = read_plan(_texts(overrides))
    if plan.multirun:
        raise ConfigError("fedcross.run: these settings describe several runs (a sweep). Use fedcross.sweep.")
    return _opened(single(plan.overrides), overrides)


class Sweep(list[Run]):
    """The runs of a sweep, in its order."""

    @property
    def metrics(self) -> pd.DataFrame:
        """One tidy frame: a row for each round of each run, with the settings in which the runs differ as columns."""
        import pandas as pd

        from fedcross.conf.compose import compose
        from fedcross.server.run_folder import saved_overrides

        settings = pd.json_normalize([compose(saved_overrides(run.folder)) for run in self])
        differing = settings.loc[:, settings.astype(str).nunique() > 1].drop(columns="output", errors="ignore")
        parts = [run.metrics.assign(**{str(k): v for k, v in differing.iloc[i].items()}) for i, run in enumerate(self)]
        return pd.concat(parts, ignore_index=True)


def sweep(*overrides: str) -> Sweep:
    """Run every combination of the given settings, one after another, and return the runs in that order.

    Parameters
    ----------
    *overrides : str
        As for :func:`run`, with several values: ``"method=fedavg,fedcross"``, ``"seed=1,2,3"``;
        ``"hydra.sweep.dir=DIR"`` sets the folder of the sweep; an interrupted sweep in it continues.

    Raises
    ------
    ConfigError
        If a combination has errors. The message lists the errors of all combinations; no run has started yet.
    """
    from fedcross.server.command_line import checked_plan
    from fedcross.server.jobs import job_name, sweep_job

    plan = checked_plan(["-m", *_texts(overrides)])
    if plan.search:
        raise ConfigError("fedcross.sweep: a search runs on the command line: fedcross -m hydra/sweeper=optuna ...")
    named = any(o.startswith("hydra.sweep.dir=") for o in overrides)
    # Hydra remembers the time of its first composition, so it would name one folder for all sweeps of a process.
    root = plan.folder if named and plan.folder else _unused(Path(time.strftime("multirun/%Y-%m-%d/%H-%M-%S")))
    found = Sweep()
    for job in plan.jobs:
        folder = (root / job_name(job)).resolve()
        sweep_job(job, folder)
        found.append(_opened(folder, job))
    return found


def load(folder: str | Path, data_root: str | None = None) -> Run:
    """Return the run in `folder`, finished or not.

    Raises
    ------
    StorageError
        If `folder` holds no run.
    """
    path = Path(folder)
    if not (path / "metrics.jsonl").is_file():
        raise StorageError(f"{path}: no metrics.jsonl here. Name the folder of a run.")
    return Run(path.resolve(), data_root)


def _texts(overrides: tuple[str, ...]) -> list[str]:
    """Return `overrides` as a list, or raise a ConfigError about what is no text."""
    if wrong := [o for o in overrides if not isinstance(o, str)]:
        raise ConfigError(f'{wrong[0]!r}: a setting is text. Write "rounds=5".')
    return list(overrides)


def _unused(folder: Path) -> Path:
    """Return `folder`, or the first of ``folder-2``, ``folder-3``... that does not exist."""
    names = (folder if i == 1 else folder.with_name(f"{folder.name}-{i}") for i in count(1))
    return next(name for name in names if not name.exists())


def _opened(folder: Path, overrides: tuple[str, ...] | list[str]) -> Run:
    root = [o.removeprefix("data_root=").strip("'\"") for o in overrides if o.startswith("data_root=")]
    return Run(folder, root[-1] if root else None)
