"""What an asynchronous run did with its time: who was visited how often, how stale uploads were, and a timeline."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedcross.analysis.groups import Group
from fedcross.analysis.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Whole = NDArray[np.int64]
Times = NDArray[np.float64]
#: The timeline shows so many times the mean length of a visit.
SHOWN = 10
BLUE, RED = "#0072B2", "#D55E00"


@dataclass(frozen=True)
class Visits:
    """The visits of one run, in the order in which they ended; all arrays have shape (visits,).

    Attributes
    ----------
    problem, method : str
        Those of the run's group.
    slot, client, staleness : array of int
        Whose model, who trained it, and how many uploads were accepted meanwhile.
    start, finish : array of float
        Seconds of the run's clock.
    accepted : array of bool
        False for lost visits.
    """

    problem: str
    method: str
    slot: Whole
    client: Whole
    staleness: Whole
    start: Times
    finish: Times
    accepted: NDArray[np.bool_]


def read_visits(group: Group) -> Visits | None:
    """Return the visits of the first run of `group`; None if it has no readable ``visits.jsonl``."""
    return load_visits(group.runs[0].path / "visits.jsonl", group.problem, group.method)


def load_visits(path: Path, problem: str = "", method: str = "") -> Visits | None:
    """Return the visits in the file at `path`; lines that cannot be read are left out."""
    lines = []
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    for line in text.splitlines():
        try:
            found = json.loads(line)
            whole = [int(found[name]) for name in ("slot", "client", "staleness")]
            lines.append((*whole, float(found["start"]), float(found["finish"]), bool(found["accepted"])))
        except (ValueError, TypeError, KeyError):
            continue
    if not lines:
        return None
    slot, client, staleness, start, finish, accepted = map(np.asarray, zip(*lines))
    return Visits(problem, method, slot, client, staleness, start, finish, accepted)


def visits_table(found: Sequence[Visits]) -> Table:
    """Return how the visits of each run were spread over clients, slots and time."""
    rows = []
    for one in found:
        clients, slots = np.unique(one.client, return_counts=True)[1], np.unique(one.slot, return_counts=True)[1]
        stale = one.staleness[one.accepted] if one.accepted.any() else np.zeros(1)
        span = float(one.finish[-1]) or 1.0
        rows.append(
            (
                one.problem,
                one.method,
                str(len(one.slot)),
                f"{100 * (1 - one.accepted.mean()):.1f}",
                f"{60 * len(one.slot) / span:.2f}",
                f"{clients.min()} / {np.median(clients):g} / {clients.max()}",
                f"{slots.min()} / {np.median(slots):g} / {slots.max()}",
                f"{stale.mean():.1f} / {np.quantile(stale, 0.9):g} / {stale.max():g}",
            )
        )
    header = (
        *("problem", "method", "visits", "lost %", "visits per minute", "per client: least / median / most"),
        *("per slot: least / median / most", "staleness: mean / 90 % / most"),
    )
    note = (
        "Asynchronous runs, first seed. Per client: among clients with a visit. Minutes of the run's clock. "
        "Staleness: uploads that the server accepted while a visit was under way."
    )
    return Table("Visits", header, rows, note)


def plot_visits(found: Sequence[Visits], path: Path, seconds: float | None = None) -> None:
    """Draw timelines of slots and of devices, staleness and visits per client into a PNG, one row for each run.

    The timelines show the first `seconds` of the clock; by default ten times the mean length of a visit.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(18, 3.6 * len(found)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(found), 4, squeeze=False, width_ratios=(3, 3, 1.5, 1.5))
    for axes, one in zip(grid, found):
        until = min(seconds or SHOWN * float((one.finish - one.start).mean()), float(one.finish.max()))
        _timeline(axes[0], one, one.slot, until, "slot")
        _timeline(axes[1], one, one.client, until, "device")
        axes[0].set_title(f"{one.method}: {one.problem}", loc="left", fontsize=9)
        stale = one.staleness[one.accepted]
        axes[2].hist(stale, bins=np.arange(0, (stale.max() if stale.size else 0) + 2) - 0.5, color=BLUE)
        axes[2].set(xlabel="staleness, uploads", ylabel="visits")
        axes[3].hist(np.unique(one.client, return_counts=True)[1], bins="auto", color=BLUE)
        axes[3].set(xlabel="visits of a client", ylabel="clients")
    figure.savefig(path)


def _timeline(axes: Axes, one: Visits, lane: Whole, until: float, name: str) -> None:
    """Draw one bar for each visit that begins before `until`; lost ones in another colour."""
    shown = one.start < until
    lanes = np.unique(lane[shown])
    height = {int(value): i for i, value in enumerate(lanes)}
    for start, finish, where, accepted in zip(one.start[shown], one.finish[shown], lane[shown], one.accepted[shown]):
        colour = BLUE if accepted else RED
        axes.barh(height[int(where)], min(finish, until) - start, left=start, height=0.8, color=colour, edgecolor="w")
    every = -(-len(lanes) // 20)
    axes.set_yticks(range(0, len(lanes), every), [str(value) for value in lanes[::every]])
    axes.set(xlabel="seconds of the clock", ylabel=name, xlim=(0, until))
