"""The ablation of FedCross: smoothed accuracy by alpha and selection, as numbers and as a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fedcross.analysis.labels import identity

ALPHA, SELECTION = "method.alpha", "method.selection"
Grid = tuple[str, pd.DataFrame, pd.DataFrame]
"""Problem, smoothed accuracy in [0, 1] (mean over seeds), and number of runs, both alpha by selection."""


def grids(frame: pd.DataFrame) -> list[Grid]:
    """Return a grid for every configuration that ran with two or more alphas and two or more selections."""
    rows = [
        {
            "rest": tuple(item for item in identity(run) if item[0] not in (ALPHA, SELECTION)),
            "problem": problem,
            "alpha": run.settings[ALPHA],
            "selection": run.settings[SELECTION],
            "smoothed": smoothed,
        }
        for run, problem, smoothed in zip(frame["run"], frame["problem"], frame["smoothed"], strict=True)
        if run.settings.get(ALPHA) is not None and run.settings.get(SELECTION) is not None
    ]
    found: list[Grid] = []
    for _, members in pd.DataFrame(rows).groupby("rest", sort=False) if rows else []:
        cells = members.groupby(["alpha", "selection"])["smoothed"]
        if members["alpha"].nunique() > 1 and members["selection"].nunique() > 1:
            seeds = cells.count().unstack().fillna(0).astype(int)
            found.append((str(members["problem"].iloc[0]), cells.mean().unstack(), seeds))
    return found


def plot_grids(found: Sequence[Grid], path: Path) -> None:
    """Draw the heat maps into a PNG at `path`, side by side, with the percent in every cell."""
    import seaborn
    from matplotlib.figure import Figure

    height = 1.6 + 0.5 * max(len(values) for _, values, _ in found)
    figure = Figure(figsize=(5.2 * len(found), height), dpi=100, layout="constrained")
    for axes, (problem, values, _) in zip(np.ravel(figure.subplots(1, len(found), squeeze=False)), found, strict=True):
        label = {"label": "best mean of 10 evaluations, %"}
        seaborn.heatmap(100 * values, annot=True, fmt=".2f", cmap="cividis", cbar_kws=label, ax=axes)
        axes.set_title(problem, loc="left", fontsize=10)
    figure.savefig(path)
