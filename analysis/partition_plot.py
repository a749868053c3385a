"""``fedcross partition``: examples per client and class, as a table and as the bubble plot of the papers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from fedcross.conf.compose import compose
from fedcross.conf.schema import PACKAGES, settings_class
from fedcross.core.errors import ConfigError
from fedcross.core.settings import Settings, find, parse
from fedcross.tasks.base import Partition, Task

WIDEST = 20
"""Most classes that get a column each. With more, a row gives a client's number of classes and its largest share."""


@dataclass(frozen=True)
class Setup:
    """A task and how to divide it."""

    task: Task
    partition: Settings
    module: str
    title: str
    seed: int

    def counts(self, seed: int) -> pd.DataFrame:
        """Return the number of training examples per client (rows) and class (columns) with `seed`."""
        parts: Partition = find(PACKAGES["partition"], self.module, "partition").split(self.partition, self.task, seed)
        y, classes = np.asarray(self.task.train.y), self.task.classes
        names = list(self.task.label_names)
        columns = names if len(names) == classes else [str(k) for k in range(classes)]
        return pd.DataFrame([np.bincount(y[part], minlength=classes) for part in parts.train], columns=columns)


def setup(overrides: Sequence[str]) -> Setup:
    """Compose the configuration, check its task and partition, and load the task.

    Raises
    ------
    ConfigError
        If the two groups have errors; the message lists all of them.
    DataError
        If the data set cannot be read.
    """
    raw = compose(overrides)
    faults: list[str] = []
    found: dict[str, tuple[str, Settings]] = {}
    for group in ("task", "partition"):
        values = dict(raw[group])
        name = str(values.pop("name"))
        module = str(values.pop("module", name))
        params = parse(settings_class(group, module), values, group, faults)
        if params is not None:
            found[group] = (module, params)
    if faults:
        raise ConfigError(faults)
    task = find(PACKAGES["task"], found["task"][0], "task").load(found["task"][1])
    module, params = found["partition"]
    shown = [f"{name} {value}" for name in ("clients", "beta") if (value := getattr(params, name, None)) is not None]
    return Setup(
        task, params, module, f"{task.name}, {module}" + (f" ({', '.join(shown)})" if shown else ""), raw["seed"]
    )


def sizes(table: pd.DataFrame) -> pd.Series[float]:
    """Return the sizes of the ``smallest``, ``median`` and ``largest`` client."""
    total = table.sum(axis=1)
    return pd.Series({"smallest": total.min(), "median": total.median(), "largest": total.max()})


def client_table(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table of clients and classes as text."""
    total = table.sum(axis=1)
    if table.shape[1] <= WIDEST:
        shown = table.astype(str).replace("0", "")
    else:
        largest = (table.max(axis=1) / total).map("{:.2f}".format)
        shown = pd.DataFrame({"classes": (table > 0).sum(axis=1).astype(str), "largest share": largest})
    shown.insert(0, "examples", total.astype(str))
    return shown.rename_axis("client").reset_index().astype({"client": str})


def over_seeds(chosen: Setup, count: int) -> pd.DataFrame:
    """Return smallest, median and largest client over `count` seeds: mean, lowest, highest, as text."""
    found = pd.DataFrame([sizes(chosen.counts(chosen.seed + i)) for i in range(count)])
    text = found.agg(["mean", "min", "max"]).T.map("{:.0f}".format).set_axis(["mean", "lowest", "highest"], axis=1)
    text.index = [f"{name} client" for name in text.index]
    return text.rename_axis(f"client sizes over {count} seeds").reset_index()


def bubble_plot(table: pd.DataFrame, title: str, file: Path) -> None:
    """Write the bubble plot of the papers: one bubble per client and class; its area is the number of examples.

    Raises
    ------
    ConfigError
        If `file` has another ending than a picture, or its folder does not exist.
    """
    from matplotlib.figure import Figure

    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--plot {file}: there is no folder {file.absolute().parent}. Make it, or name another.")
    clients, classes = table.shape
    cell, height = 0.3 if clients <= 40 else 0.16, 0.26 if classes <= 40 else 0.1  # inches
    figure = Figure(figsize=(max(5.0, 1.8 + cell * clients), max(2.6, 1.4 + height * classes)), layout="constrained")
    axes = figure.add_subplot()
    client, label = np.nonzero(table.to_numpy())
    largest = (72 * min(cell, height) * 1.25) ** 2  # square points: the largest bubble just overlaps its neighbours
    area = largest * table.to_numpy()[client, label] / table.to_numpy().max()
    axes.scatter(client, label, s=area, alpha=0.7, linewidths=0, color="tab:blue")
    axes.set(xlabel="client", ylabel="class", xlim=(-1, clients), ylim=(-1, classes))
    if classes <= 40 and max(map(len, table.columns)) <= 12:
        axes.set_yticks(range(classes), list(table.columns))
    shown = " / ".join(f"{size:g}" for size in sizes(table))
    axes.set_title(f"{title}\nclient sizes {shown}, largest bubble {table.to_numpy().max()}", fontsize=9)
    axes.grid(alpha=0.2)
    axes.set_axisbelow(True)
    try:
        figure.savefig(file, dpi=150)
    except ValueError as error:
        raise ConfigError(f"--plot {file}: a plot cannot be written as {file.suffix!r}. Use .png or .svg.") from error
