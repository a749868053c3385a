"""The table in the terminal at the end of a demo or a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedcross.analysis.groups import Group, Spread, group_runs
from fedcross.analysis.runs import Run

if TYPE_CHECKING:
    from rich.table import Table


def percent(value: Spread, digits: int = 2) -> str:
    """Return a share in [0, 1] as percent, with its spread if there is one: ``54.78 ± 0.56``."""
    if math.isnan(value.mean):
        return "–"
    text = f"{100 * value.mean:.{digits}f}"
    return text if math.isnan(value.std) else f"{text} ± {100 * value.std:.{digits}f}"


def size(count: float) -> str:
    """Return a number of bytes with a decimal unit: ``12.3 MB``."""
    if math.isnan(count):
        return "–"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Return seconds as a short text: ``8.1 s``, ``3m 20s``, ``2h 05m``."""
    if math.isnan(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    return f"{minutes // 60}h {minutes % 60:02d}m"


def console_table(runs: Sequence[Run]) -> Table:
    """Return one line per configuration: method, final, best and smoothed accuracy, bytes moved, time.

    The highest smoothed accuracy of each problem is bold. Over several seeds: mean ± sample standard deviation.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    groups, _ = group_runs(runs)
    table = Table(title="Test accuracy of the global model, %", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("method")
    for name in ("final", "best", "smoothed", "seeds", "moved", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    problems = list(dict.fromkeys(group.problem for group in groups))
    for problem in problems:
        members = [group for group in groups if group.problem == problem]
        if len(problems) > 1:
            table.add_row(problem, style="italic")
        top = max(_smoothed(group).mean for group in members)
        for group in members:
            table.add_row(*_cells(group), style="bold" if _smoothed(group).mean == top and len(members) > 1 else None)
        table.add_section()
    return table


def _smoothed(group: Group) -> Spread:
    return group.over_seeds(lambda run: run.smoothed.mean)


def _cells(group: Group) -> list[str]:
    return [
        group.method if group.finished else f"{group.method} (unfinished)",
        percent(group.over_seeds(lambda run: run.final), 1),
        percent(group.over_seeds(lambda run: run.best), 1),
        percent(_smoothed(group), 1),
        str(len(group.runs)),
        size(group.over_seeds(lambda run: run.bytes_total).mean),
        duration(group.over_seeds(lambda run: run.seconds_total).mean),
    ]
