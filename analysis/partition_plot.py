"""``fedcross partition``: examples per client and class, as a table and as the bubble plot of the papers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedcross.conf.compose import compose
from fedcross.conf.schema import RunConfig, parsed
from fedcross.core.errors import ConfigError
from fedcross.tasks.base import Partition, Task

#: Most classes that get a column each. With more, a row gives a client's number of classes and its largest share.
WIDEST = 20


@dataclass(frozen=True)
class Setup:
    """A task and how to divide it."""

    task: Task
    config: RunConfig

    @property
    def title(self) -> str:
        """Task, partition, and its main settings."""
        values = {name: getattr(self.config.partition, name, None) for name in ("clients", "beta")}
        shown = ", ".join(f"{name} {value}" for name, value in values.items() if value is not None)
        return f"{self.task.name}, {self.config.modules['partition']}" + (f" ({shown})" if shown else "")

    def counts(self, seed: int | None = None) -> pd.DataFrame:
        """Return training examples per client, or site by name (rows), and class (columns); `seed` is the run's."""
        config, task = self.config, self.task
        seed = config.seed if seed is None else seed
        parts: Partition = config.module("partition").split(config.partition, task, seed)
        columns = [*task.label_names] if len(task.label_names) == task.classes else [*map(str, range(task.classes))]
        rows = [np.bincount(np.asarray(task.train.y)[part], minlength=task.classes) for part in parts.train]
        return pd.DataFrame(rows, pd.Index(parts.names, name="site") if parts.names else None, columns)


def setup(overrides: Sequence[str]) -> Setup:
    """Compose the configuration and load its task; a ConfigError lists all faults, a DataError what cannot be read."""
    config, faults = parsed(compose(overrides))
    if config is None:
        raise ConfigError(faults)
    return Setup(config.module("task").load(config.task), config)


def sizes(table: pd.DataFrame) -> pd.Series[float]:
    """Return the sizes of the ``smallest``, ``median`` and ``largest`` client."""
    return table.sum(axis=1).agg(["min", "median", "max"]).set_axis(["smallest", "median", "largest"])


def client_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table of clients and classes as text."""
    total = table.sum(axis=1)
    if table.shape[1] <= WIDEST:
        shown = table.astype(str).replace("0", "")
    else:
        largest = (table.max(axis=1) / total).map("{:.2f}".format)
        shown = pd.DataFrame({"classes": (table > 0).sum(axis=1).astype(str), "largest share": largest})
    shown.insert(0, "examples", total.astype(str))
    if table.index.name:  # sites have names
        shown = shown.reset_index()
    return shown.rename_axis("client").reset_index().astype({"client": str})


def over_seeds(chosen: Setup, count: int) -> pd.DataFrame:
    """Return smallest, median and largest client over `count` seeds: mean, lowest, highest, as text."""
    found = pd.DataFrame([sizes(chosen.counts(chosen.config.seed + i)) for i in range(count)])
    text = found.agg(["mean", "min", "max"]).T.map("{:.0f}".format).set_axis(["mean", "lowest", "highest"], axis=1)
    return text.rename(index="{} client".format).rename_axis(f"client sizes over {count} seeds").reset_index()


def bubble_plot(table: pd.DataFrame, title: str, file: Path) -> None:
    """Write the papers' bubble plot to `file`: a bubble per client and class, its area the number of examples."""
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--plot {file}: there is no folder {file.absolute().parent}. Make it, or name another.")
    (clients, classes), most = table.shape, table.to_numpy().max()
    cell, height = 0.3 if clients <= 40 else 0.16, 0.26 if classes <= 40 else 0.1  # inches
    figure = Figure(figsize=(max(5.0, 1.8 + cell * clients), max(2.6, 1.4 + height * classes)), layout="constrained")
    axes = figure.add_subplot()
    client, label = np.nonzero(table.to_numpy())
    largest = (72 * min(cell, height) * 1.25) ** 2  # square points: the largest bubble just overlaps its neighbours
    area = largest * table.to_numpy()[client, label] / most
    axes.scatter(client, label, s=area, alpha=0.7, linewidths=0, color="tab:blue")
    axes.set(xlabel="client", ylabel="class", xlim=(-1, clients), ylim=(-1, classes))
    if classes <= 40 and max(map(len, table.columns)) <= 12:
        axes.set_yticks(range(classes), list(table.columns))
    shown = " / ".join(f"{size:g}" for size in sizes(table))
    axes.set_title(f"{title}\nclient sizes {shown}, largest bubble {most}", fontsize=9)
    axes.grid(alpha=0.2)
    axes.set_axisbelow(True)
    try:
        figure.savefig(file, dpi=150)
    except ValueError as error:
        raise ConfigError(f"--plot {file}: a plot cannot be written as {file.suffix!r}. Use .png or .svg.") from error
