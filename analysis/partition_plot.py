"""``fedcross partition``: examples per client and class, as a table and as the bubble plot of the papers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedcross.conf.compose import compose
from fedcross.conf.schema import PACKAGES, settings_class
from fedcross.core.errors import ConfigError
from fedcross.core.settings import Settings, find, parse
from fedcross.tasks.base import Partition, Task

Counts = npt.NDArray[np.int64]
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

    def split(self, seed: int) -> Partition:
        """Return the partition for `seed`."""
        parts: Partition = find(PACKAGES["partition"], self.module, "partition").split(self.partition, self.task, seed)
        return parts


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
    shown = {key: value for key, value in params.model_dump().items() if key in ("clients", "beta")}
    settings = ", ".join(f"{key} {value}" for key, value in shown.items() if value is not None)
    title = f"{task.name}, {module}" + (f" ({settings})" if settings else "")
    return Setup(task, params, module, title, int(raw["seed"]))


def counts(task: Task, partition: Partition) -> Counts:
    """Return the number of training examples per client and class, shape ``(clients, classes)``."""
    y = np.asarray(task.train.y)
    return np.stack([np.bincount(y[part], minlength=task.classes) for part in partition.train])


def sizes(table: Counts) -> tuple[int, float, int]:
    """Return the sizes of the smallest, median and largest client."""
    total = table.sum(axis=1)
    return int(total.min()), float(np.median(total)), int(total.max())


def rows(table: Counts, labels: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of the table of clients and classes."""
    total = table.sum(axis=1)
    if table.shape[1] <= WIDEST:
        names = [*labels] if len(labels) == table.shape[1] else [str(label) for label in range(table.shape[1])]
        header = ["client", "examples", *names]
        body = [[str(i), str(n), *(str(c) if c else "" for c in row)] for i, (n, row) in enumerate(zip(total, table))]
    else:
        header = ["client", "examples", "classes", "largest share"]
        body = [
            [str(i), str(n), str(np.count_nonzero(row)), f"{row.max() / n:.2f}"]
            for i, (n, row) in enumerate(zip(total, table))
        ]
    return header, body


def markdown(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---:"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def over_seeds(chosen: Setup, count: int) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of smallest, median and largest client over `count` seeds: mean, lowest, highest."""
    found = np.array([sizes(counts(chosen.task, chosen.split(chosen.seed + i))) for i in range(count)])
    header = [f"client sizes over {count} seeds", "mean", "lowest", "highest"]
    body = []
    for name, column in zip(("smallest client", "median client", "largest client"), found.T):
        body.append([name, f"{column.mean():.0f}", f"{column.min():.0f}", f"{column.max():.0f}"])
    return header, body


def check_plot(file: Path) -> None:
    """Raise an error if no plot can be written to `file`; called before anything is computed.

    Raises
    ------
    ConfigError
        If no plot has this file extension, or there is no such folder.
    """
    from matplotlib.backend_bases import FigureCanvasBase

    if file.suffix.lstrip(".") not in FigureCanvasBase.filetypes:
        raise ConfigError(f"--plot {file}: a plot cannot be written as {file.suffix!r}. Use .png, .pdf or .svg.")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--plot {file}: there is no folder {file.absolute().parent}. Make it, or name another.")


def bubble_plot(table: Counts, labels: Sequence[str], title: str, file: Path) -> None:
    """Write the bubble plot of the papers: one bubble per client and class; its area is the number of examples.

    Parameters
    ----------
    table : ndarray, shape (clients, classes)
    labels : sequence of str
        Class names; used where they are short and few.
    title : str
    file : Path
        PNG, PDF or SVG by its ending.

    Raises
    ------
    ConfigError
        If no plot can be written with this file extension.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    clients, classes = table.shape
    cell = 0.3 if clients <= 40 else 0.16  # inches
    height = 0.26 if classes <= 40 else 0.1
    figure = Figure(figsize=(max(5.0, 1.8 + cell * clients), max(2.6, 1.4 + height * classes)), layout="constrained")
    FigureCanvasAgg(figure)
    check_plot(file)
    axes = figure.add_subplot()
    client, label = np.nonzero(table)
    largest = (72 * min(cell, height) * 1.25) ** 2  # square points: the largest bubble just overlaps its neighbours
    area = largest * table[client, label] / table.max()
    axes.scatter(client, label, s=area, alpha=0.7, linewidths=0, color="tab:blue")
    axes.set(xlabel="client", ylabel="class", xlim=(-1, clients), ylim=(-1, classes))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=20, integer=True))
    named = classes <= 40 and len(labels) == classes and max(map(len, labels)) <= 12
    if named:
        axes.set_yticks(range(classes), labels)
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=10, integer=True))
    smallest, median, top = sizes(table)
    axes.set_title(f"{title}\nclient sizes {smallest} / {median:g} / {top}, largest bubble {table.max()}", fontsize=9)
    axes.grid(alpha=0.2)
    axes.set_axisbelow(True)
    figure.savefig(file, dpi=150)
