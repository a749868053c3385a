"""The Python API: run a configuration, run a sweep, open an earlier run. Settings are those of the command line.

::

    import fedcross

    run = fedcross.run("method=fedcross", "task=digits", "rounds=20")
    run.result["best_accuracy"], run.metrics["test_accuracy"], run.model, run.folder
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedcross.core.errors import ConfigError, StorageError, counted

if TYPE_CHECKING:
    from torch import nn


class Metrics(Mapping[str, NDArray[Any]]):
    """The metrics of a run as a table: one row per round, columns named as in ``metrics.jsonl``.

    It maps column names to arrays, so ``pandas.DataFrame(run.metrics)`` works. Numbers are float64, with NaN where a
    round has no value (for example, no evaluation). Columns of other values are arrays of objects.

    Parameters
    ----------
    rows : list of dict
        The lines of ``metrics.jsonl``, oldest first.
    """

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        names = dict.fromkeys(name for row in rows for name in row)
        self._columns = {name: _column([row.get(name) for row in rows]) for name in names}

    def __getitem__(self, name: str) -> NDArray[Any]:
        try:
            return self._columns[name]
        except KeyError:
            raise KeyError(f"{name}: this run has {', '.join(self._columns)}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        shown = self._shown()
        widths = [max(len(line[i]) for line in shown) for i in range(len(shown[0]))] if shown else []
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in shown]
        return "\n".join([*lines, f"{counted(len(self.rows), 'round')}, {len(self)} columns: {', '.join(self)}"])

    def _repr_html_(self) -> str:
        head, *body = self._shown() or [[]]
        rows = ["".join(f"<td>{escape(cell)}</td>" for cell in line) for line in body]
        heads = "".join(f"<th>{escape(name)}</th>" for name in head)
        table = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table><tr>{heads}</tr>{table}</table><p>{counted(len(self.rows), 'round')}, {len(self)} columns</p>"

    def _shown(self, most: int = 10) -> list[list[str]]:
        """Return the header and the last rows of the most important columns."""
        first = ("round", "test_accuracy", "test_loss", "train_loss", "clients", "dropped", "seconds")
        names = [name for name in first if name in self._columns]
        rows = self.rows[-most:]
        return [names, *([_cell(row.get(name)) for name in names] for row in rows)] if names else []


def _column(values: list[Any]) -> NDArray[Any]:
    if all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values):
        return np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


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
    def metrics(self) -> Metrics:
        """The metrics of all rounds on disk, as a table."""
        try:
            lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            return Metrics([json.loads(line) for line in lines])
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
        from fedcross.server.commands.export import network

        return network(self.folder, self.data_root)

    def slice(self, width: float | str) -> nn.Module:
        """Return the global model of `width`, for runs whose models have several, as :attr:`model` does.

        A report's name of a size works too: ``"0.4@2"`` keeps the first two groups of channels whole.

        Raises
        ------
        StorageError
            If the run has no models of this width; the message lists those that it has.
        """
        from fedcross.server.commands.export import network

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
    from fedcross.server.check import read_plan
    from fedcross.server.jobs import single

    plan = read_plan(_texts(overrides))
    if plan.multirun:
        raise ConfigError("fedcross.run: these settings describe several runs (a sweep). Use fedcross.sweep.")
    return _opened(single(plan.overrides), overrides)


def sweep(*overrides: str) -> list[Run]:
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
    from fedcross.server.check import checked_plan
    from fedcross.server.jobs import job_name, sweep_job

    plan = checked_plan(["-m", *_texts(overrides)])
    named = any(o.startswith("hydra.sweep.dir=") for o in overrides)
    # Hydra remembers the time of its first composition, so it would name one folder for all sweeps of a process.
    root = plan.folder if named and plan.folder else _unused(Path(time.strftime("multirun/%Y-%m-%d/%H-%M-%S")))
    found = []
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
