"""Plots learning curves: the mean over seeds with a band, one panel per problem."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedcross.analysis.axes import AXES
from fedcross.analysis.groups import Group
from fedcross.analysis.runs import Curve
from fedcross.tasks.scoring import WINDOW

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's palette for colour-blind readers, without its yellow (too faint on white)."""
DASHES = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))
LONG, WIDE = 40, 110
"""If a name has more letters, all names stand below the axes, in lines of so many."""
DIRECT = 7
"""Up to this many curves, names stand at the line ends; a panel with more curves has a legend."""
MOST = 10
"""Of more curves in a panel, those of :data:`ALWAYS` and the highest at their ends have names; the others are grey."""
ALWAYS = ("fedavg", "fedcross")
GREY = "#c4c4c4"
SMOOTH_FROM = 100
"""With at least this many evaluations, the line is a moving mean, drawn over a thin line of the measured values."""


def styles(groups: Sequence[Group]) -> dict[str, tuple[str, object]]:
    """Return colour and dash by method label, the same in every panel."""
    names = list(dict.fromkeys(group.method for group in groups))
    return {name: (COLOURS[i % len(COLOURS)], DASHES[i // len(COLOURS) % len(DASHES)]) for i, name in enumerate(names)}


def trailing_mean(values: Curve, window: int = WINDOW) -> Curve:
    """Return the mean of each value and up to ``window - 1`` before it, shape (points,)."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, values.size + 1)
    start = np.maximum(end - window, 0)
    return np.asarray((total[end] - total[start]) / (end - start), dtype=np.float64)


def plot_curves(groups: Sequence[Group], x: str, path: Path) -> None:
    """Draw test accuracy over axis `x` (a key of ``AXES``) into a PNG at `path`.

    The band is one sample standard deviation over seeds to each side; a single seed has no band.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(group.problem for group in groups))
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    below = max(_lines([_name(g) for g in groups if g.problem == panel]) for panel in panels)
    figure = Figure(figsize=(7.6 * columns, (4.4 + 0.14 * below) * rows), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(rows, columns, squeeze=False).ravel()
    style = styles([g for panel in panels for g in named([one for one in groups if one.problem == panel])])
    for axes, name in zip(all_axes, panels):
        _panel(axes, [g for g in groups if g.problem == name], x, style)
        axes.set_title(name, loc="left", fontsize=10)
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    figure.savefig(path)


def _name(group: Group) -> str:
    return group.method if group.finished else f"{group.method} (unfinished)"


def _lines(names: Sequence[str]) -> int:
    """Return how many lines the names take below the axes; 0 where there is room elsewhere."""
    return sum(len(textwrap.wrap(name, WIDE)) for name in names) if max(map(len, names)) > LONG else 0


def named(groups: Sequence[Group]) -> list[Group]:
    """Return the groups of a panel that have names and colours: all, or :data:`MOST` of them."""
    if len(groups) <= MOST:
        return list(groups)

    def rank(group: Group) -> tuple[bool, float]:
        _, mean, _ = group.curve("rounds")
        return group.settings["method.name"] in ALWAYS, float(trailing_mean(mean)[-1]) if mean.size else 0.0

    kept = sorted(groups, key=rank, reverse=True)[:MOST]
    return [group for group in groups if group in kept]


def _panel(axes: Axes, groups: Sequence[Group], x: str, style: dict[str, tuple[str, object]]) -> None:
    ends: list[tuple[float, float, str, str]] = []
    smooth = False
    told = named(groups)
    rest = [group for group in groups if group not in told]
    for number, group in enumerate(rest):
        at, mean, _ = group.curve(x)
        label = f"{len(rest)} others" if number == len(rest) - 1 else None
        axes.plot(at, 100 * mean, color=GREY, linewidth=0.8, zorder=1, label=label)
    for group in told:
        colour, dash = style[group.method]
        at, mean, std = group.curve(x)
        if not at.size:
            continue
        mean, std = 100 * mean, 100 * std
        if at.size >= SMOOTH_FROM:
            smooth = True
            axes.plot(at, mean, color=colour, alpha=0.25, linewidth=0.6)
            mean, std = trailing_mean(mean), trailing_mean(std)
        if len(group.runs) > 1:
            axes.fill_between(at, mean - std, mean + std, color=colour, alpha=0.18, linewidth=0)
        name = _name(group)
        marker = "o" if at.size <= 25 else None
        axes.plot(at, mean, color=colour, linestyle=dash, linewidth=1.8, marker=marker, markersize=3, label=name)
        ends.append((float(at[-1]), float(mean[-1]), name, colour))
    axes.set_xlabel(AXES[x])
    axes.set_ylabel(f"test accuracy, %{f' (mean of {WINDOW} evaluations)' if smooth else ''}")
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.02)
    if ends and _lines([name for _, _, name, _ in ends]):
        lines, names = axes.get_legend_handles_labels()
        axes.legend(
            lines,
            [textwrap.fill(name, WIDE) for name in names],
            fontsize=7,
            frameon=False,
            loc="upper left",
            bbox_to_anchor=(0, -0.14),
        )
    elif len(ends) > DIRECT:
        axes.legend(fontsize=7, ncols=2, frameon=False, loc="lower right")
    else:
        _name_ends(axes, ends)


def _name_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each name right of the axes at the height of its line's end; move names apart that would overlap."""
    low, high = axes.get_ylim()
    gap = 0.055 * (high - low)
    heights: list[float] = []
    ordered = sorted(ends, key=lambda end: end[1])
    for _, y, _, _ in ordered:
        heights.append(max(y, heights[-1] + gap) if heights else y)
    over = max(0.0, heights[-1] - high) if heights else 0.0
    for (_, y, name, colour), height in zip(ordered, heights):
        axes.annotate(
            name,
            xy=(1.0, y),
            xytext=(1.02, height - over),
            xycoords=axes.get_yaxis_transform(),
            textcoords=axes.get_yaxis_transform(),
            color=colour,
            fontsize=9 if all(len(end[2]) <= 24 for end in ends) else 8,
            va="center",
            annotation_clip=False,
        )
