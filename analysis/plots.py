"""Plots of a report: learning curves, and FedCross's ablation (smoothed accuracy by alpha and selection)."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import seaborn
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedcross.analysis.runs import AXES, IGNORED, WHERE, curve, identity
from fedcross.tasks.accuracies import WINDOW

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette for colour-blind readers, without its yellow (too faint on white)."""
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
MOST = 10
"""Of more curves in a panel, those of :data:`ALWAYS` and the highest at their ends have names; the others are grey."""
ALWAYS = ("fedavg", "fedcross")
SMOOTH_FROM = 100
"""With at least this many evaluations the line is a moving mean, over a thin line of the measured values."""


def plot_curves(frame: pd.DataFrame, x: str, path: Path) -> None:
    """Draw test accuracy over axis `x` (a key of ``AXES``) as a PNG; the band is one standard deviation over seeds."""
    panels = list(frame.groupby("problem", sort=False))
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(7.6 * columns, 4.4 * rows), dpi=90, layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False).ravel()
    named = {group for _, part in panels for group in most_important(part)}
    labels = frame.loc[frame["group"].isin(named), "method"].unique()
    looks = itertools.cycle(itertools.product(DASHES, COLOURS))
    style = {label: {"color": colour, "linestyle": dash} for label, (dash, colour) in zip(labels, looks)}
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


def _panel(axes: Axes, frame: pd.DataFrame, x: str, style: dict[str, dict[str, Any]], named: set[int]) -> None:
    smooth = ""
    for _, group in frame[frame["group"].isin(named)].groupby("group", sort=False):
        points, name = curve(group, x), group["method"].iloc[0]
        mean, std, colour = 100 * points["mean"], 100 * points["std"], style[name]["color"]
        if len(mean) >= SMOOTH_FROM:
            smooth = f" (mean of {WINDOW} evaluations)"
            axes.plot(points["x"], mean, color=colour, alpha=0.25, linewidth=0.6)
            mean, std = (part.rolling(WINDOW, min_periods=1).mean() for part in (mean, std))
        if len(group) > 1:
            axes.fill_between(points["x"], mean - std, mean + std, color=colour, alpha=0.18, linewidth=0)
        label = textwrap.fill(name + (" (unfinished)" if any(run.note for run in group["run"]) else ""), 60)
        marker = "o" if len(mean) <= 25 else None
        axes.plot(points["x"], mean, linewidth=1.8, marker=marker, markersize=3, label=label, **style[name])
    others = [group for number, group in frame.groupby("group", sort=False) if number not in named]
    for i, group in enumerate(others):
        points, label = curve(group, x), "" if i else f"{len(others)} others"
        axes.plot(points["x"], 100 * points["mean"], color="#c4c4c4", linewidth=0.8, zorder=1, label=label)
    axes.set(xlabel=AXES[x], ylabel=f"test accuracy, %{smooth}")
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="best")


Grid = tuple[str, pd.DataFrame, pd.DataFrame]
"""Problem, smoothed accuracy in [0, 1] (mean over seeds), and number of runs, both alpha by selection."""


def grids(frame: pd.DataFrame) -> list[Grid]:
    """Return a grid for every configuration that ran with two or more alphas and two or more selections."""
    ran = frame.assign(
        alpha=[run.settings.get("method.alpha") for run in frame["run"]],
        selection=[run.settings.get("method.selection") for run in frame["run"]],
        rest=[identity(run, (*IGNORED, *WHERE, "method.alpha", "method.selection")) for run in frame["run"]],
    )
    found: list[Grid] = []
    for _, members in ran.dropna(subset=["alpha", "selection"]).groupby("rest", sort=False):
        cells = members.groupby(["alpha", "selection"])["smoothed"]
        if members["alpha"].nunique() > 1 and members["selection"].nunique() > 1:
            seeds = cells.count().unstack().fillna(0).astype(int)
            found.append((str(members["problem"].iloc[0]), cells.mean().unstack(), seeds))
    return found


def plot_grids(found: Sequence[Grid], path: Path) -> None:
    """Draw the heat maps into a PNG at `path`, side by side, with the percent in every cell."""
    height = 1.6 + 0.5 * max(len(values) for _, values, _ in found)
    figure = Figure(figsize=(5.2 * len(found), height), dpi=100, layout="constrained")
    for axes, (problem, values, _) in zip(np.ravel(figure.subplots(1, len(found), squeeze=False)), found, strict=True):
        label = {"label": "best mean of 10 evaluations, %"}
        seaborn.heatmap(100 * values, annot=True, fmt=".2f", cmap="cividis", cbar_kws=label, ax=axes)
        axes.set_title(problem, loc="left", fontsize=10)
    figure.savefig(path)
