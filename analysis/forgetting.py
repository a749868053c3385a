"""What a model forgets at another client: accuracy per test class before and after the exchange."""

from __future__ import annotations

import numpy as np
import pandas as pd
import seaborn
from matplotlib.figure import Figure
from numpy.typing import NDArray
from sklearn.metrics import recall_score

from fedcross.analysis.subject import Arrays, Options, Subject
from fedcross.core.errors import DataError
from fedcross.tasks.scoring import predictions

HELD = 0.02
"""A client holds a class if at least this share of its examples belongs to it."""


def per_class(subject: Subject, arrays: Arrays, indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the accuracy on each class, (classes,); NaN for a class without examples."""
    guesses = predictions(subject.network(arrays), subject.inputs(indices)).argmax(1).numpy()
    classes, truth = range(subject.task.classes), subject.task.test.y[indices]
    return np.asarray(recall_score(truth, guesses, labels=classes, average=None, zero_division=np.nan))


def held(subject: Subject, client: int) -> NDArray[np.bool_]:
    """Return which classes `client` holds, (classes,)."""
    labels = subject.task.train.y[subject.partition.train[client]]
    return np.bincount(labels, minlength=subject.task.classes) >= max(HELD * len(labels), 1)


def measure(subject: Subject, number: int, examples: int) -> pd.DataFrame:
    """Return a row for each model and class of round `number`.

    Columns: ``model`` (slot), ``class``, accuracies ``before`` and ``after`` the exchanges in [0, 1], and whether the
    ``home`` client and the last ``host`` hold the class.
    """
    exchanges = subject.exchanges(number)
    if len(exchanges) < 2:
        raise DataError(f"{subject.folder}: round {number} has one exchange. Forgetting needs a cross-training method.")
    first, last = exchanges[0], exchanges[-1]
    indices, classes = subject.sample(examples), [subject.label(k) for k in range(subject.task.classes)]
    parts = []
    for slot in (slot for slot in first.models if slot in last.models):
        part = pd.DataFrame({"round": number, "model": slot, "class": classes})
        for when, who, one in (("before", "home", first), ("after", "host", last)):
            part[when], part[who] = per_class(subject, one.models[slot], indices), held(subject, one.clients[slot])
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def summary(found: pd.DataFrame) -> dict[str, float]:
    """Return mean changes over classes of the home only (forgotten), the host only (learned), both and neither."""
    change = found["after"] - found["before"]
    home, host = found["home"], found["host"]
    where = {"home only": home & ~host, "host only": host & ~home, "both": home & host, "neither": ~home & ~host}
    return {name: float(change[mask].mean()) for name, mask in where.items()}


def draw(subject: Subject, options: Options) -> tuple[dict[str, Figure], pd.DataFrame]:
    """Return heat maps of the accuracies and their change, a row for each round, and the table."""
    found = [measure(subject, number, options.examples) for number in subject.rounds(options.rounds)]
    title = "Accuracy per class before and after the exchange"
    figure, grid = subject.panels(title, len(found), 3, (15.5, 4.4 * len(found)))
    for row, one in zip(grid, found, strict=True):
        words = ", ".join(f"{name}: {100 * value:+.1f}" for name, value in summary(one).items() if value == value)
        one = one.assign(change=one["after"] - one["before"])
        titles = {
            "before": f"round {one['round'].iloc[0]}, before (dot: home holds the class)",
            "after": "after (dot: host holds the class)",
            "change": f"change in points; mean over classes held by\n{words}",
        }
        for axes, (column, title) in zip(row, titles.items(), strict=True):
            table = one.pivot_table(index="model", columns="class", values=column, sort=False, dropna=False)
            low, colours = (-100, "RdBu") if column == "change" else (0, "viridis")
            seaborn.heatmap(100 * table, vmin=low, vmax=100, cmap=colours, ax=axes)
            axes.set_title(title, fontsize=9, loc="left")
            if column != "change":
                holds = one.pivot(index="model", columns="class", values={"before": "home", "after": "host"}[column])
                rows, columns = np.nonzero(holds[table.columns].loc[table.index].to_numpy())
                axes.scatter(columns + 0.5, rows + 0.5, s=14, color="white", edgecolors="black", linewidths=0.5)
    return {"forgetting": figure}, pd.concat(found)
