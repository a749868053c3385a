"""The ablation of FedCross: smoothed accuracy by alpha and selection, as numbers and as a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedcross.analysis.groups import Group, identity
from fedcross.analysis.runs import Curve

ALPHA, SELECTION = "method.alpha", "method.selection"


@dataclass(frozen=True)
class Grid:
    """The ablation of one problem.

    Attributes
    ----------
    alphas, selections : list
        Rows and columns.
    values : array of float, shape (alphas, selections)
        Smoothed accuracy in [0, 1], mean over seeds; nan without a run.
    seeds : array of int, shape (alphas, selections)
        Number of runs in each cell.
    """

    problem: str
    alphas: list[float]
    selections: list[str]
    values: Curve
    seeds: np.typing.NDArray[np.int64]


def grids(groups: Sequence[Group]) -> list[Grid]:
    """Return a grid for every configuration that ran with two or more alphas and two or more selections."""
    families: dict[tuple[object, ...], list[Group]] = {}
    for group in groups:
        if group.settings.get(ALPHA) is not None and group.settings.get(SELECTION) is not None:
            rest = tuple(item for item in identity(group.runs[0]) if item[0] not in (ALPHA, SELECTION))
            families.setdefault(rest, []).append(group)
    found = []
    for members in families.values():
        alphas = sorted({float(group.settings[ALPHA]) for group in members})
        selections = sorted({str(group.settings[SELECTION]) for group in members})
        if len(alphas) < 2 or len(selections) < 2:
            continue
        values = np.full((len(alphas), len(selections)), np.nan)
        seeds = np.zeros(values.shape, dtype=np.int64)
        for group in members:
            at = alphas.index(float(group.settings[ALPHA])), selections.index(str(group.settings[SELECTION]))
            values[at] = group.over_seeds(lambda run: run.smoothed.mean).mean
            seeds[at] = len(group.runs)
        found.append(Grid(members[0].problem, alphas, selections, values, seeds))
    return found


def plot_grids(found: Sequence[Grid], path: Path) -> None:
    """Draw the heat maps into a PNG at `path`, one beside the other, with the percent in every cell."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = 1.6 + 0.5 * max(len(grid.alphas) for grid in found)
    figure = Figure(figsize=(5.2 * len(found), height), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, grid in zip(figure.subplots(1, len(found), squeeze=False).ravel(), found):
        image = axes.imshow(100 * grid.values, cmap="cividis", aspect="auto")
        axes.set_title(grid.problem, loc="left", fontsize=10)
        axes.set_xticks(range(len(grid.selections)), grid.selections)
        axes.set_yticks(range(len(grid.alphas)), [f"{a:g}" for a in grid.alphas])
        axes.set_ylabel("alpha")
        axes.set_xlabel("selection")
        middle = (np.nanmin(grid.values) + np.nanmax(grid.values)) / 2
        for (row, column), value in np.ndenumerate(grid.values):
            text = "–" if np.isnan(value) else f"{100 * value:.2f}"
            colour = "black" if np.isnan(value) or value > middle else "white"
            axes.text(column, row, text, ha="center", va="center", color=colour, fontsize=9)
        figure.colorbar(image, ax=axes, label="smoothed test accuracy, %")
    figure.savefig(path)
