"""Measures what a model forgets at another client: accuracy per test class before and after the exchange."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcross.analysis.subject import Arrays, Options, Subject
from fedcross.core.errors import DataError

#: A client holds a class if at least this share of its examples belongs to it.
HELD = 0.02
CHUNK = 1000


@dataclass(frozen=True)
class Change:
    """Accuracy per class, (models, classes), of one round, before and after its exchanges.

    Attributes
    ----------
    round : int
        The round.
    slots : list of int
        The models.
    before, after : array (models, classes)
        Shares in [0, 1]; nan for a class without test examples.
    home, host : bool array (models, classes)
        Classes held by the model's home client and by its last host.
    """

    round: int
    slots: list[int]
    before: NDArray[np.float64]
    after: NDArray[np.float64]
    home: NDArray[np.bool_]
    host: NDArray[np.bool_]

    def mean(self, where: NDArray[np.bool_]) -> float:
        """Return the mean change of accuracy over the entries where `where` is true; nan if there are none."""
        change = (self.after - self.before)[where]
        change = change[~np.isnan(change)]
        return float(change.mean()) if change.size else float("nan")

    def summary(self) -> dict[str, float]:
        """Return mean changes over classes of the home only (forgotten), the host only (learned), both, neither."""
        return {
            "home only": self.mean(self.home & ~self.host),
            "host only": self.mean(self.host & ~self.home),
            "both": self.mean(self.home & self.host),
            "neither": self.mean(~self.home & ~self.host),
        }


def per_class(subject: Subject, arrays: Arrays, indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the accuracy on each class, (classes,)."""
    import torch

    model = subject.network(arrays)
    with torch.no_grad():
        chunks = [indices[i : i + CHUNK] for i in range(0, len(indices), CHUNK)]
        guesses = np.concatenate([model(subject.inputs(chunk)).argmax(1).numpy() for chunk in chunks])
    labels = subject.task.test.y[indices]
    counts = np.bincount(labels, minlength=subject.task.classes)
    right = np.bincount(labels[guesses == labels], minlength=subject.task.classes)
    return np.asarray(np.divide(right, counts, out=np.full(len(counts), np.nan), where=counts > 0))


def held(subject: Subject, client: int) -> NDArray[np.bool_]:
    """Return which classes `client` holds, (classes,)."""
    labels = subject.task.train.y[subject.partition.train[client]]
    return np.bincount(labels, minlength=subject.task.classes) >= max(HELD * len(labels), 1)


def measure(subject: Subject, number: int, examples: int) -> Change:
    """Return the accuracies of round `number` on `examples` test examples."""
    exchanges = subject.exchanges(number)
    if len(exchanges) < 2:
        raise DataError(f"{subject.folder}: round {number} has one exchange. Forgetting needs a cross-training method.")
    first, last = exchanges[0], exchanges[-1]
    slots = [slot for slot in first.models if slot in last.models]
    indices = subject.sample(examples)
    return Change(
        number,
        slots,
        np.array([per_class(subject, first.models[slot], indices) for slot in slots]),
        np.array([per_class(subject, last.models[slot], indices) for slot in slots]),
        np.array([held(subject, first.clients[slot]) for slot in slots]),
        np.array([held(subject, last.clients[slot]) for slot in slots]),
    )


def draw(subject: Subject, options: Options, out: Path) -> list[Path]:
    """Write ``forgetting.png`` and ``forgetting.csv`` into `out`; return their paths."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = [measure(subject, number, options.examples) for number in subject.rounds(options.rounds)]
    figure = Figure(figsize=(15.5, 4.4 * len(found)), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"Accuracy per class before and after the exchange: {subject.name}", x=0.01, ha="left")
    for row, one in zip(figure.subplots(len(found), 3, squeeze=False), found):
        words = ", ".join(f"{name}: {100 * value:+.1f}" for name, value in one.summary().items() if value == value)
        _heat(
            figure, row[0], subject, one, one.before, f"round {one.round}, before (dot: home holds the class)", one.home
        )
        _heat(figure, row[1], subject, one, one.after, "after (dot: host holds the class)", one.host)
        _heat(
            figure,
            row[2],
            subject,
            one,
            one.after - one.before,
            f"change in points; mean over classes held by\n{words}",
            None,
        )
    picture, table = out / "forgetting.png", out / "forgetting.csv"
    figure.savefig(picture)
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("round", "model", "class", "before", "after", "home_holds", "host_holds"))
        for one in found:
            for (i, k), before in np.ndenumerate(one.before):
                mine = (before, one.after[i, k], int(one.home[i, k]), int(one.host[i, k]))
                writer.writerow((one.round, one.slots[i], subject.label(k), *mine))
    return [picture, table]


def _heat(
    figure: Any, axes: Any, subject: Subject, one: Change, values: NDArray[np.float64], title: str, dots: Any
) -> None:
    low, colours = (0, "viridis") if dots is not None else (-100, "RdBu")
    image = axes.imshow(100 * values, vmin=low, vmax=100, cmap=colours, aspect="auto")
    if dots is not None:
        rows, columns = np.nonzero(dots)
        axes.scatter(columns, rows, s=14, color="white", edgecolors="black", linewidths=0.5)
    axes.set_xticks(range(values.shape[1]), [subject.label(k) for k in range(values.shape[1])], rotation=45, ha="right")
    axes.set_yticks(range(len(one.slots)), one.slots)
    axes.tick_params(labelsize=8)
    axes.set_ylabel("model")
    axes.set_title(title, fontsize=9, loc="left")
    figure.colorbar(image, ax=axes, shrink=0.85)
