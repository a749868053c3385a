"""Plots learning curves: the mean over seeds with a band, one panel per problem."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fedcross.analysis.labels import curve
from fedcross.analysis.runs import AXES
from fedcross.tasks.scoring import WINDOW

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette for colour-blind readers, without its yellow (too faint on white)."""
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
MOST = 10
"""Of more curves in a panel, those of :data:`ALWAYS` and the highest at their ends have names; the others are grey."""
ALWAYS = ("fedavg", "fedcross")
GREY = "#c4c4c4"
SMOOTH_FROM = 100
"""With at least this many evaluations the line is a moving mean, over a thin line of the measured values."""


def plot_curves(frame: pd.DataFrame, x: str, path: Path) -> None:
    """Draw test accuracy over axis `x` (a key of ``AXES``) of the runs in `frame` into a PNG at `path`.

    The band is one sample standard deviation over seeds to each side.
    """
    from matplotlib.figure import Figure

    panels = list(frame.groupby("problem", sort=False))
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(7.6 * columns, 4.4 * rows), dpi=90, layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False).ravel()
    named = {group for _, part in panels for group in most_important(part)}
    labels = frame.loc[frame["group"].isin(named), "method"].unique()
    style: dict[str, tuple[str, object]] = {
        name: (COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]) for i, name in enumerate(labels)
    }
    for axes, (problem, part) in zip(all_axes, panels, strict=False):
        _panel(axes, part, x, style, named)
        axes.set_title(str(problem), loc="left", fontsize=10)
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    figure.savefig(path)


def most_important(frame: pd.DataFrame) -> set[int]:
    """Return the groups of a panel that have names and colours: all, or :data:`MOST` of them."""
    ends = {}
    for number, group in frame.groupby("group", sort=False):
        last = curve(group)["mean"].tail(WINDOW).mean()
        ends[number] = (group["run"].iloc[0].settings["method.name"] in ALWAYS, np.nan_to_num(last))
    return set(sorted(ends, key=lambda number: ends[number], reverse=True)[:MOST])


def _panel(axes: Axes, frame: pd.DataFrame, x: str, style: dict[str, tuple[str, object]], named: set[int]) -> None:
    others = frame.loc[~frame["group"].isin(named), "group"].nunique()
    smooth = False
    for number, group in frame.groupby("group", sort=False):
        points = curve(group, x)
        mean, std = 100 * points["mean"], 100 * points["std"]
        if number not in named:
            axes.plot(
                points["x"], mean, color=GREY, linewidth=0.8, zorder=1, label=f"{others} others" if others else None
            )
            others = 0
            continue
        name = group["method"].iloc[0]
        colour, dash = style[name]
        if len(mean) >= SMOOTH_FROM:
            smooth = True
            axes.plot(points["x"], mean, color=colour, alpha=0.25, linewidth=0.6)
            mean, std = (part.rolling(WINDOW, min_periods=1).mean() for part in (mean, std))
        if len(group) > 1:
            axes.fill_between(points["x"], mean - std, mean + std, color=colour, alpha=0.18, linewidth=0)
        label = textwrap.fill(name + (" (unfinished)" if any(run.note for run in group["run"]) else ""), 60)
        marker = "o" if len(mean) <= 25 else None
        axes.plot(
            points["x"], mean, color=colour, linestyle=dash, linewidth=1.8, marker=marker, markersize=3, label=label
        )
    axes.set_xlabel(AXES[x])
    axes.set_ylabel(f"test accuracy, %{f' (mean of {WINDOW} evaluations)' if smooth else ''}")
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="best")
