"""Tables of a report as plain values, and their text as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.groups import Group
from analysis.table import duration, percent, size


@dataclass(frozen=True)
class Table:
    """A titled table; every cell is text for the reader."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def accuracy_table(groups: Sequence[Group]) -> Table:
    """Return final, best and smoothed accuracy, bytes and seconds of every group."""
    header = ("problem", "method", "seeds", "final %", "best %", "smoothed %", "± in window", "moved", "time", "rounds")
    rows = []
    for group in groups:
        inside = group.over_seeds(lambda run: run.smoothed.std)
        rows.append(
            (
                group.problem,
                group.method,
                str(len(group.runs)),
                percent(group.over_seeds(lambda run: run.final)),
                percent(group.over_seeds(lambda run: run.best)),
                percent(group.over_seeds(lambda run: run.smoothed.mean)),
                f"{100 * inside.mean:.2f}",
                size(group.over_seeds(lambda run: run.bytes_total).mean),
                duration(group.over_seeds(lambda run: run.seconds_total).mean),
                rounds_done(group),
            )
        )
    windows = sorted({run.smoothed.window for group in groups for run in group.runs})
    note = (
        "Test accuracy of the global model; mean ± sample standard deviation over seeds. Final is the last evaluation. "
        f"Smoothed is the largest moving mean over {' or '.join(map(str, windows))} evaluations; "
        "the column after it is the standard deviation of the evaluations in that window."
    )
    return Table("Accuracy", header, rows, note)


def rounds_done(group: Group) -> str:
    """Return the rounds of the group's runs; ``37 of 100`` for one that is not finished."""
    planned = group.settings.get("rounds")
    done = sorted({int(run.columns["round"][-1]) for run in group.runs})
    text = str(done[0]) if len(done) == 1 else f"{done[0]}–{done[-1]}"
    return text if group.finished or planned is None else f"{text} of {planned}"


def default_target(groups: Sequence[Group]) -> float:
    """Return the highest multiple of 5 % that every run reaches, in [0, 1]; nan if that is 0."""
    lowest = min((run.best for group in groups for run in group.runs), default=math.nan)
    steps = math.floor(lowest / 0.05 + 1e-9)
    return round(0.05 * steps, 2) if steps > 0 else math.nan


def target_table(groups: Sequence[Group], targets: Sequence[float]) -> Table:
    """Return rounds, bytes and seconds until the test accuracy first is at least each target (in [0, 1])."""
    rows = []
    for target in targets:
        for group in groups:
            rounds = group.over_seeds(lambda run, t=target: run.reach(t, "rounds"))  # type: ignore[misc]
            moved = group.over_seeds(lambda run, t=target: run.reach(t, "bytes"))  # type: ignore[misc]
            seconds = group.over_seeds(lambda run, t=target: run.reach(t, "seconds"))  # type: ignore[misc]
            reached = f"{rounds.n} of {len(group.runs)}"
            if rounds.n == 0:
                cells = ["never", "–", "–"]
            else:
                width = "" if math.isnan(rounds.std) else f" ± {rounds.std:.0f}"
                cells = [f"{rounds.mean:.0f}{width}", size(moved.mean * 1e6), duration(seconds.mean)]
            rows.append((f"{100 * target:g} %", group.problem, group.method, reached, *cells))
    header = ("target", "problem", "method", "reached", "rounds", "moved", "time")
    return Table("To a target accuracy", header, rows, "Means over the runs that reached the target.")


def markdown(table: Table) -> str:
    """Return the table as GitHub Markdown with its title and note; columns are padded for reading as text."""
    cells = [[cell.replace("|", "\\|") for cell in row] for row in (table.header, *table.rows)]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(table.header))]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    parts = [f"## {table.title}", "\n".join(lines)]
    return "\n\n".join(parts + ([table.note] if table.note else [])) + "\n"


CSV_FIELDS = (
    "task", "model", "partition", "beta", "method", "settings", "seeds", "rounds", "finished",
    "final_mean", "final_std", "best_mean", "best_std", "smoothed_mean", "smoothed_std", "smoothed_window_std",
    "bytes_mean", "seconds_mean",
)  # fmt: skip


def csv_text(groups: Sequence[Group]) -> str:
    """Return one line of plain numbers per group: accuracies in percent, bytes, seconds; empty where unknown."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CSV_FIELDS)
    for group in groups:
        of = group.settings.get
        final, best = group.over_seeds(lambda run: run.final), group.over_seeds(lambda run: run.best)
        smooth = group.over_seeds(lambda run: run.smoothed.mean)
        numbers = [
            *(100 * v for s in (final, best, smooth) for v in (s.mean, s.std)),
            100 * group.over_seeds(lambda run: run.smoothed.std).mean,
            group.over_seeds(lambda run: run.bytes_total).mean,
            group.over_seeds(lambda run: run.seconds_total).mean,
        ]
        head = [of("task.name"), of("model.name"), of("partition.name"), of("partition.beta"), of("method.name")]
        words = ["" if value is None else value for value in head]
        count = [len(group.runs), rounds_done(group), "yes" if group.finished else "no"]
        writer.writerow([*words, group.method, *count, *("" if math.isnan(v) else f"{v:.6g}" for v in numbers)])
    return text.getvalue()
