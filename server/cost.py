"""``fedcross ... --cost``: measures two rounds of each distinct cell of a command line, and multiplies."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcross.core.errors import FedcrossError

if TYPE_CHECKING:
    from fedcross.server.sweep import Plan

LENGTH = re.compile(r"(seed|rounds|stop_at|evaluate_every|output|resume|logger)=")
"""Settings that do not change how long a round takes."""

Pace = tuple[float, float]
"""Seconds of a round without evaluation, and seconds of one evaluation."""


@dataclass
class Cell:
    """Jobs that differ only in seed and length.

    Attributes
    ----------
    settings : list of str
        Their overrides, without seed and length.
    runs, rounds, evaluations : int
        Runs, and rounds and evaluations that they still have to do.
    """

    settings: list[str]
    runs: int = 0
    rounds: int = 0
    evaluations: int = 0
    names: dict[str, str] = field(default_factory=dict)

    def hours(self, pace: Pace) -> float:
        """Return the hours of the remaining rounds, one run after the other."""
        return (self.rounds * pace[0] + self.evaluations * pace[1]) / 3600


def cells(plan: Plan) -> list[Cell]:
    """Group the jobs of `plan`; return the cells in the plan's order."""
    from fedcross.conf.schema import load

    found: dict[tuple[str, ...], Cell] = {}
    for job in plan.jobs:
        config = load(job)
        settings = [one for one in job if not LENGTH.match(one.lstrip("+"))]
        cell = found.setdefault(tuple(settings), Cell(settings, names=dict(config.names)))
        last = min(config.rounds, config.stop_at or config.rounds)
        left = range(_done(plan, job) + 1, last + 1)
        cell.runs += 1
        cell.rounds += len(left)
        cell.evaluations += sum(number % config.evaluate_every == 0 or number == last for number in left)
    return list(found.values())


def _done(plan: Plan, job: Sequence[str]) -> int:
    """Return how many rounds of `job` its folder already holds."""
    from fedcross.server.jobs import folder_for, job_name

    if not plan.multirun:
        folder = folder_for(plan.overrides)[0]
    elif plan.folder is not None:
        folder = plan.folder / job_name(job)
    else:
        return 0
    return len(_lines(folder / "metrics.jsonl"))


def measure(settings: Sequence[str]) -> Pace:
    """Run two rounds of `settings` in a temporary folder and return the pace of the second."""
    from fedcross.core.overrides import quote
    from fedcross.server.app import untold
    from fedcross.server.launch import launch

    with tempfile.TemporaryDirectory(prefix="fedcross-cost-") as folder:
        trial = ["rounds=2", "evaluate_every=1", "logger=none", f"output={quote(folder + '/run')}"]
        with untold():
            launch([*settings, *trial], Path(folder) / "run")
        line = _lines(Path(folder) / "run" / "metrics.jsonl")[-1]
    work = line["seconds_training"] + line["seconds_aggregation"]
    return work, max(line["seconds"] - work, 0.0)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def show(plan: Plan, pace: Callable[[Sequence[str]], Pace] = measure) -> None:
    """Print how long `plan` takes on this machine, one run after the other; below the table, errors of cells."""
    from rich.console import Console
    from rich.table import Table

    table = Table("method", "task", "model", "engine", "settings", title="Cost on this machine, one run at a time")
    for name in ("runs", "rounds left", "s/round", "s/evaluation", "hours"):
        table.add_column(name, justify="right", no_wrap=True)
    rows, total, errors = cells(plan), 0.0, []
    common = set.intersection(*(set(cell.settings) for cell in rows))
    for cell in rows:
        own = " ".join(one for one in cell.settings if one not in common)
        head = [*(cell.names[name] for name in ("method", "task", "model", "engine")), own]
        try:
            seconds = pace(cell.settings) if cell.rounds else (0.0, 0.0)
            total += cell.hours(seconds)
            numbers = [f"{seconds[0]:.3g}", f"{seconds[1]:.3g}", f"{cell.hours(seconds):.3g}"]
        except FedcrossError as error:
            errors.append(str(error))
            numbers = ["-"] * 3
        table.add_row(*head, str(cell.runs), str(cell.rounds), *numbers)
    table.add_section()
    sums = [str(sum(cell.runs for cell in rows)), str(sum(cell.rounds for cell in rows))]
    table.add_row("total", *[""] * 4, *sums, "", "", f"{total:.3g}")
    console = Console()
    console.width = console.width if console.is_terminal else 140
    console.print(table)
    for text in dict.fromkeys(errors):
        console.print(f"Not in the total: {text}", soft_wrap=True, highlight=False, markup=False)
    if errors and len(errors) == len(rows):
        raise FedcrossError("no cell could be measured")
