"""``fedcross ... --cost``: measures two rounds of each distinct cell of a command line, and multiplies."""

from __future__ import annotations

import contextlib
import io
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedcross.conf.schema import load
from fedcross.core.errors import FedcrossError
from fedcross.core.settings import quote
from fedcross.server.command_line import folder_for
from fedcross.server.launch import launch
from fedcross.server.run_folder import Lines
from fedcross.server.sweep import Plan, job_name

#: Settings that do not change how long a round takes.
LENGTH = re.compile(r"(seed|rounds|stop_at|evaluate_every|output|resume|logger)=")
#: Seconds of a round without evaluation, and seconds of one evaluation.
Pace = tuple[float, float]


@dataclass
class Cell:
    """Jobs that differ only in seed and length: their other `settings`, and what they still have to do."""

    settings: list[str]
    names: dict[str, str]
    runs: int = 0
    rounds: int = 0
    evaluations: int = 0


def cells(plan: Plan) -> list[Cell]:
    """Group the jobs of `plan`; return the cells in the plan's order."""
    found: dict[tuple[str, ...], Cell] = {}
    for job in plan.jobs:
        config = load(job)
        folder = (plan.folder or Path()) / job_name(job) if plan.multirun else folder_for(plan.overrides)
        settings = [one for one in job if not LENGTH.match(one.lstrip("+"))]
        cell = found.setdefault(tuple(settings), Cell(settings, dict(config.names)))
        last = min(config.rounds, config.stop_at or config.rounds)
        left = range(len(Lines(folder / "metrics.jsonl").read()) + 1, last + 1)
        cell.runs += 1
        cell.rounds += len(left)
        cell.evaluations += sum(number % config.evaluate_every == 0 or number == config.rounds for number in left)
    return list(found.values())


def measure(settings: Sequence[str]) -> Pace:
    """Run two rounds of `settings` in a temporary folder and return the pace of the second."""
    with tempfile.TemporaryDirectory(prefix="fedcross-cost-") as place:
        folder = Path(place) / "run"
        trial = ["rounds=2", "evaluate_every=1", "logger=none", f"output={quote(str(folder))}"]
        with contextlib.redirect_stdout(io.StringIO()):
            launch([*settings, *trial], folder)
        line = json.loads(Lines(folder / "metrics.jsonl").read()[-1])
    work = line["seconds_training"] + line["seconds_aggregation"]
    return work, max(line["seconds"] - work, 0.0)


def show(plan: Plan, pace: Callable[[Sequence[str]], Pace] = measure) -> None:
    """Print how long `plan` takes on this machine, one run after the other, and the errors of cells."""
    import pandas as pd

    found, rows, total, errors = cells(plan), [], 0.0, []
    common = set.intersection(*(set(cell.settings) for cell in found))
    for cell in found:
        row = {name: cell.names[name] for name in ("method", "task", "model", "engine")}
        row |= {"settings": " ".join(one for one in cell.settings if one not in common)}
        row |= {"runs": str(cell.runs), "rounds left": str(cell.rounds)}
        try:
            seconds = pace(cell.settings) if cell.rounds else (0.0, 0.0)
            hours = (cell.rounds * seconds[0] + cell.evaluations * seconds[1]) / 3600
            row |= {"s/round": f"{seconds[0]:.3g}", "s/evaluation": f"{seconds[1]:.3g}", "hours": f"{hours:.3g}"}
            total += hours
        except FedcrossError as error:
            errors.append(str(error))
        rows.append(row)
    print(f"Cost on this machine, one run at a time\n{pd.DataFrame(rows).fillna('-').to_string(index=False)}")
    runs, rounds = sum(cell.runs for cell in found), sum(cell.rounds for cell in found)
    print(f"total {runs} runs, {rounds} rounds, {total:.3g} hours")
    for text in dict.fromkeys(errors):
        print(f"Not in the total: {text}")
    if len(errors) == len(rows):
        raise FedcrossError("no cell could be measured")
