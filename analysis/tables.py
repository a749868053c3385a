"""The tables of a report; every cell is text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import methodcaller

import numpy as np

from fedcross.analysis.ablation import Grid
from fedcross.analysis.groups import Group
from fedcross.analysis.published import Cell, accuracy_cells, deviations, published_rounds
from fedcross.analysis.significance import ALL_PAIRS, T_FROM, WILCOXON_FROM, compare
from fedcross.analysis.table import duration, percent, size


@dataclass(frozen=True)
class Table:
    """A table with a title; every cell is text."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


OPTIONAL = ("published rounds", "p (Wilcoxon)", "virtual time")


def compact(table: Table) -> Table:
    """Return the table without uninformative columns.

    The column ``problem`` moves into the title if all rows agree; optional columns of dashes are removed.
    """
    columns = {name: [row[i] for row in table.rows] for i, name in enumerate(table.header)}
    title = table.title
    if len(problems := set(columns.get("problem", ()))) == 1:
        title = f"{title}: {problems.pop()}"
        del columns["problem"]
    kept = {name: cells for name, cells in columns.items() if name not in OPTIONAL or set(cells) != {"–"}}
    return Table(title, tuple(kept), list(zip(*kept.values())), table.note)


def defence_note(groups: Sequence[Group]) -> str:
    """Return in how many runs the defence was on, and what it did in a round of theirs; empty if in none."""
    runs = [run for group in groups for run in group.runs]
    on = [run for run in runs if run.settings.get("defence.enabled")]
    if not on:
        return ""
    rounds = sum(len(run.columns["round"]) for run in on)
    did = [
        f"{sum(float(np.nansum(run.column(name))) for run in on) / rounds:.3g} {word}"
        for name, word in (("clipped", "uploads clipped"), ("lightened", "lightened"), ("quarantined", "quarantined"))
    ]
    return f"Defence on in {len(on)} of {len(runs)} runs: {', '.join(did)} per round of these."


def accuracy_table(groups: Sequence[Group]) -> Table:
    """Return final, best and smoothed accuracy, bytes and seconds of every group."""
    header = (
        "problem", "method", "final %", "best %", "smoothed %", "± in window", "last ten %", "seeds", "rounds", "moved",
        "time",
    )  # fmt: skip
    rows = []
    for group in groups:
        inside = group.over_seeds(lambda run: run.smoothed.std)
        rows.append(
            (
                group.problem,
                group.method,
                percent(group.over_seeds(lambda run: run.final)),
                percent(group.over_seeds(lambda run: run.best)),
                percent(group.over_seeds(lambda run: run.smoothed.mean)),
                f"{100 * inside.mean:.2f}",
                percent(group.over_seeds(lambda run: run.last_ten)),
                str(len(group.runs)),
                rounds_done(group),
                size(group.over_seeds(lambda run: run.bytes_total).mean),
                duration(group.over_seeds(lambda run: run.seconds_total).mean),
            )
        )
    windows = sorted({run.smoothed.window for group in groups for run in group.runs})
    few = " (a run with fewer has their mean, which is another measure)" if len(windows) > 1 else ""
    note = (
        "Test accuracy of the global model; mean ± sample standard deviation over seeds. Final is the last evaluation. "
        f"Smoothed is the largest moving mean over {windows[-1]} evaluations{few}; "
        "the column after it is the population standard deviation of the evaluations in that window. Last ten is the "
        "mean of the last ten evaluations: it takes no maximum, so it does not favour the method that varies most."
    )
    apart = sorted({run.cadence for group in groups for run in group.runs} - {0})
    if len(apart) > 1:
        note += (
            f" **Runs of this table were evaluated every {' or '.join(map(str, apart))} rounds**, so their ten "
            "evaluations are means over other numbers of rounds, and their rounds to a target are known to as many."
        )
    return Table("Accuracy", header, rows, note)


def width_table(groups: Sequence[Group]) -> Table | None:
    """Return the final accuracy of the models of every size, one column for each; None if all runs have one size."""
    sizes = list(dict.fromkeys(size for group in groups for run in group.runs for size in run.sizes))
    if not sizes:
        return None
    sizes.sort(key=lambda size: tuple(-float(part) for part in f"{size}@0".split("@")[:2]))
    rows = [
        (
            group.problem,
            group.method,
            *(percent(group.over_seeds(methodcaller("of_size", size))) for size in sizes),
        )
        for group in groups
        if any(run.sizes for run in group.runs)
    ]
    note = (
        "Test accuracy of the global model of every width at the last evaluation; mean ± sample standard deviation "
        "over seeds."
    )
    if any("@" in size for size in sizes):
        note += " 0.4@2 keeps the first two groups of channels whole (method.whole; AdaptiveFL's starts)."
    return Table("Accuracy by width", ("problem", "method", *sizes), rows, note)


def rounds_done(group: Group) -> str:
    """Return the rounds of the group's runs; ``37 of 100`` for an unfinished run."""
    planned = group.settings.get("rounds")
    done = sorted({int(run.columns["round"][-1]) for run in group.runs})
    text = str(done[0]) if len(done) == 1 else f"{done[0]}–{done[-1]}"
    return text if group.finished or planned is None else f"{text} of {planned}"


def default_target(groups: Sequence[Group]) -> float:
    """Return the highest multiple of 5 % that every run reaches, in [0, 1]; nan if it is what guessing gives."""
    runs = [run for group in groups for run in group.runs]
    found = round(0.05 * math.floor(min((run.best for run in runs), default=0.0) / 0.05 + 1e-9), 2)
    chance = max((1 / len(run.result["class_accuracy"]) for run in runs if run.result.get("class_accuracy")), default=0)
    return found if found > chance + 1e-9 else math.nan


def at_table(groups: Sequence[Group], rounds: Sequence[int]) -> Table:
    """Return the test accuracy after each of `rounds`, one column for each; a dash where no run was evaluated then."""
    rows = [
        (
            group.problem,
            group.method,
            *(percent(group.over_seeds(methodcaller("at", number))) for number in rounds),
            str(len(group.runs)),
        )
        for group in groups
    ]
    note = "Test accuracy of the global model in that round; mean ± sample standard deviation over seeds."
    header = ("problem", "method", *(f"round {number} %" for number in rounds), "seeds")
    return Table("After a round", header, rows, note)


def target_table(groups: Sequence[Group], targets: Sequence[float]) -> Table:
    """Return rounds, bytes and both kinds of seconds until the test accuracy first is each target (in [0, 1])."""
    rows = []
    for target in targets:
        for group in groups:
            rounds = group.over_seeds(lambda run, t=target: run.reach(t, "rounds"))  # type: ignore[misc]
            moved = group.over_seeds(lambda run, t=target: run.reach(t, "bytes"))  # type: ignore[misc]
            seconds = group.over_seeds(lambda run, t=target: run.reach(t, "seconds"))  # type: ignore[misc]
            reached = f"{rounds.n} of {len(group.runs)}"
            virtual = group.over_seeds(lambda run, t=target: run.reach(t, "virtual"))  # type: ignore[misc]
            if rounds.n == 0:
                cells = ["never", "–", "–", "–"]
            else:
                width = "" if math.isnan(rounds.std) else f" ± {rounds.std:.0f}"
                times = [duration(seconds.mean), duration(virtual.mean) if virtual.n else "–"]
                cells = [f"{rounds.mean:.0f}{width}", size(moved.mean * 1e6), *times]
            paper = published_rounds(group.settings, target)
            cells.append(f"{paper.value:g} ({paper.source})" if paper else "–")
            rows.append((f"{100 * target:g} %", group.problem, group.method, reached, *cells))
    header = ("target", "problem", "method", "reached", "rounds", "moved", "time", "virtual time", "published rounds")
    return Table("To a target accuracy", header, rows, "Means over the runs that reached the target.")


def published_table(groups: Sequence[Group]) -> Table | None:
    """Return the smoothed accuracy beside the published cell; None if no group has one."""
    rows = []
    for group in groups:
        mine = group.over_seeds(lambda run: run.smoothed.mean)
        merged: dict[tuple[float, float | None], list[Cell]] = {}
        for cell in accuracy_cells(group.settings):
            merged.setdefault((cell.value, cell.spread), []).append(cell)
        for same in merged.values():
            cell = same[0]
            paper = f"{cell.value:.2f}" + ("" if cell.spread is None else f" ± {cell.spread:.2f}")
            difference = f"{100 * mine.mean - cell.value:+.2f}"
            source = ", ".join(dict.fromkeys(c.source for c in same))
            other = ", ".join(deviations(cell, group.settings)) or "–"
            rows.append((group.problem, group.method, percent(mine), str(mine.n), paper, difference, source, other))
    header = (
        "problem",
        "method",
        "smoothed %",
        "seeds",
        "published %",
        "difference",
        "source",
        "differs from the paper",
    )
    note = (
        "Beside the smoothed accuracy, because the papers' logger most likely reports that. "
        "The papers' ± is not known to be over seeds."
    )
    return Table("Beside the published numbers", header, rows, note) if rows else None


def significance_table(groups: Sequence[Group]) -> Table | None:
    """Return the paired comparisons; None if no two groups of a problem share two seeds."""
    found = compare(groups)
    rows = [
        (
            *(c.problem, c.first, c.second, f"{100 * c.difference:+.2f}"),
            f"{100 * c.interval[0]:+.2f} to {100 * c.interval[1]:+.2f}",
            *(str(c.n), _p(c.t), _p(c.holm), _p(c.wilcoxon)),
        )
        for c in found
    ]
    header = (
        *("problem", "first", "second", "first - second, points", "95 % interval", "n"),
        *("p (t)", "p (t, Holm)", "p (Wilcoxon)"),
    )
    note = (
        "Smoothed accuracy, paired by seed, two-sided; n is the number of shared seeds. The interval is Student's, of "
        "the mean difference, without a correction for several comparisons. Holm's correction is within a "
        f"problem. Wilcoxon's test cannot go below .05 with fewer than {WILCOXON_FROM} pairs and is left out there, "
        f"the t-test with fewer than {T_FROM}. Up to {ALL_PAIRS} configurations of a problem are all compared; of "
        "more, each with the first of the table that trains alike."
    )
    return Table("Paired over seeds", header, rows, note) if rows else None


def _p(value: float) -> str:
    if math.isnan(value):
        return "–"
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def ablation_tables(found: Sequence[Grid]) -> list[Table]:
    """Return alpha by selection for every grid, as smoothed accuracy in percent and the number of seeds."""
    tables = []
    for grid in found:
        rows = [
            (f"{alpha:g}", *("–" if n == 0 else f"{100 * v:.2f} (n={n})" for v, n in zip(values, seeds)))
            for alpha, values, seeds in zip(grid.alphas, grid.values, grid.seeds)
        ]
        title = f"Alpha and selection: {grid.problem}"
        tables.append(
            Table(title, ("alpha", *grid.selections), rows, "Smoothed accuracy, %; n is the number of seeds.")
        )
    return tables
