"""The tables of a report. Each is a frame of text; :class:`Table` writes it as Markdown, LaTeX and HTML."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

import fedcross
from fedcross.analysis.published import accuracy_cells, deviations, published_rounds
from fedcross.analysis.runs import WIDTH, Run, flatten
from fedcross.analysis.significance import ALL_PAIRS, T_FROM, WILCOXON_FROM, compare
from fedcross.analysis.text import DASH, duration, percent, size

OPTIONAL = ("published rounds", "p (Wilcoxon)", "virtual time")
NAMES = {name.lower(): name for name in dir(fedcross) if name[0].isupper()} | {
    "moon": "MOON",
    "scaffold": "SCAFFOLD",
}
"""Published name of each method."""


@dataclass(frozen=True)
class Table:
    """A table with a title and a note; `best` names the columns whose highest number is bold in LaTeX."""

    title: str
    frame: pd.DataFrame
    note: str = ""
    best: Sequence[str] = ()

    def compact(self) -> Table:
        """Return the table with a shared problem in its title, and without optional columns of dashes."""
        frame, title = self.frame, self.title
        if "problem" in frame and frame["problem"].nunique() == 1:
            title = f"{title}: {frame['problem'].iloc[0]}"
            frame = frame.drop(columns="problem")
        empty = [name for name in OPTIONAL if name in frame and (frame[name] == DASH).all()]
        return replace(self, title=title, frame=frame.drop(columns=empty))

    def markdown(self) -> str:
        """Return the table as GitHub Markdown; columns are padded for reading as text."""
        rows = [self.frame.columns, *self.frame.itertuples(index=False)]
        cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
        widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(cells[0]))]
        lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
        lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
        return "\n\n".join([f"## {self.title}", "\n".join(lines), *([self.note] if self.note else [])]) + "\n"

    def latex(self) -> str:
        """Return the table as a LaTeX float: booktabs rules, a label, numbers aligned right, the best in bold."""
        frame = self.frame.reset_index(drop=True)
        words = [name in ("problem", "method", "first", "second") for name in frame]
        if "method" in frame:
            frame["method"] = frame["method"].map(published_name)
        style = frame.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis=1)
        for name in self.best:
            numbers = pd.to_numeric(frame[name].str.split().str[0], errors="coerce")
            groups = frame["problem"] if "problem" in frame else pd.Series("", frame.index)
            top = numbers == numbers.groupby(groups).transform("max")
            style = style.apply(lambda _, top=top: ["textbf:--rwrap;" if t else "" for t in top], subset=[name])
        label = "tab:" + "".join(c if c.isalnum() else "-" for c in self.title.lower())
        text: str = style.to_latex(
            hrules=True,
            position="t",
            position_float="centering",
            column_format="".join("l" if word else "r" for word in words),
            caption=self.title.replace("_", r"\_").replace("%", r"\%"),
            label=label,
        )
        return text


def published_name(label: str) -> str:
    """Return a label with the published name of its method: ``fedcross alpha=0.9`` becomes ``FedCross alpha=0.9``."""
    name, _, settings = label.partition(" ")
    return f"{NAMES.get(name.replace('_', ''), name)} {settings}".strip()


def rounds_done(group: pd.DataFrame) -> str:
    """Return the rounds of a group's runs; ``37 of 100`` for an unfinished run."""
    done = sorted({run.rounds for run in group["run"]})
    text = str(done[0]) if len(done) == 1 else f"{done[0]}–{done[-1]}"
    planned = group["run"].iloc[0].settings.get("rounds")
    return text if planned is None or not any(run.note for run in group["run"]) else f"{text} of {planned}"


# ---- the tables ------------------------------------------------------------------------------------------------------


def per_group(frame: pd.DataFrame, row: Callable[[pd.DataFrame], dict[str, Any]]) -> pd.DataFrame:
    """Return a table with problem and method of each group of `frame`, and the cells that `row` makes of its runs."""
    return pd.DataFrame(
        [
            {"problem": group["problem"].iloc[0], "method": group["method"].iloc[0], **row(group)}
            for _, group in frame.groupby("group", sort=False)
        ]
    )


def accuracy_table(frame: pd.DataFrame) -> Table:
    """Return final, best and smoothed accuracy, bytes and seconds of every configuration."""

    def row(group: pd.DataFrame) -> dict[str, str]:
        return {
            "final %": percent(group["final"]),
            "best %": percent(group["best"]),
            "best mean of 10 %": percent(group["smoothed"]),
            "± in window": f"{100 * group['window_std'].mean():.2f}",
            "last ten %": percent(group["last_ten"]),
            "seeds": str(len(group)),
            "rounds": rounds_done(group),
            "bytes sent": size(group["bytes"].mean()),
            "time": duration(group["seconds"].mean()),
        }

    note = (
        "Test accuracy of the global model; mean ± sample standard deviation over seeds. Final is the last evaluation. "
        f"Best mean of 10 is the largest moving mean over {int(frame['window'].max())} evaluations, the papers' "
        "smoothed accuracy; the next column is the standard deviation inside that window. Last ten is the mean of the "
        "last ten evaluations."
    )
    if frame["window"].nunique() > 1:
        note += " Runs with fewer evaluations have the mean of all of theirs."
    apart = sorted({run.cadence for run in frame["run"]} - {0})
    if len(apart) > 1:
        note += f" **Runs of this table were evaluated every {' or '.join(map(str, apart))} rounds.**"
    best = ("final %", "best %", "best mean of 10 %", "last ten %")
    return Table("Accuracy", per_group(frame, row), note + defence_note(frame), best)


#: Column of :func:`metrics_table` -> where ``result.json`` has it.
METRICS = {
    "validation %": "validation_accuracy",
    "balanced %": "metrics.balanced_accuracy",
    "sensitivity %": "metrics.sensitivity",
    "specificity %": "metrics.specificity",
    "AUC %": "metrics.auc",
    "larger class %": "metrics.majority_share",
    "clients, mean %": "client_accuracy_mean",
    "clients, worst tenth %": "client_accuracy_worst_tenth",
    "clients, spread": "client_accuracy_std",
    "participants, mean %": "local_accuracy",
    "participants, worst tenth %": "local_accuracy_worst_tenth",
    "participants, spread": "local_accuracy_std",
}


def metrics_table(frame: pd.DataFrame) -> Table | None:
    """Return the metrics beside the test accuracy that some run has; None if none has one."""
    infos = [flatten(run.info) for run in frame["run"]]
    known = {column: name for column, name in METRICS.items() if any(info.get(name) is not None for info in infos)}
    if not known:
        return None

    def row(group: pd.DataFrame) -> dict[str, str]:
        found = [flatten(run.info) for run in group["run"]]
        return {c: percent([info.get(name) or np.nan for info in found]) for c, name in known.items()}

    note = (
        "Of the final global model, in percent; mean ± standard deviation over seeds. Accuracy below the share of the "
        "larger class is worse than guessing. Clients are scored on their own test data; spread is over clients."
    )
    best = [name for name in known if name.endswith("%") and not name.startswith("larger")]
    return Table("Other metrics", per_group(frame, row), note, best)


def clients_table(frame: pd.DataFrame) -> Table | None:
    """Return a row for each named client with the global model's accuracy there; None if no client has a name."""
    parts = []
    for _, group in frame.groupby("group", sort=False):
        names: list[str] = next((run.info["client_names"] for run in group["run"] if run.info.get("client_names")), [])
        found = pd.DataFrame([run.info.get("client_accuracy", {}) for run in group["run"]])
        parts += [
            {
                "problem": group["problem"].iloc[0],
                "client": names[int(client)],
                "method": group["method"].iloc[0],
                "accuracy %": percent(found[client]),
            }
            for client in found
            if int(client) < len(names)
        ]
    if not parts:
        return None
    tidy = pd.DataFrame(parts)
    wide = tidy.pivot_table("accuracy %", ["problem", "client"], "method", aggfunc="first", sort=False).fillna(DASH)
    note = "Test accuracy of the final global model on each client's own test data, %; mean ± deviation over seeds."
    return Table("Clients", wide.reset_index().rename_axis(columns=None), note)


def defence_note(frame: pd.DataFrame) -> str:
    """Return in how many runs the defence was on, and what it did per round; empty if in none."""
    on = [run for run in frame["run"] if run.settings.get("defence.enabled")]
    if not on:
        return ""
    rounds = sum(run.rounds for run in on)
    words = [f"{sum(_total(run, n) for run in on) / rounds:.3g} {n}" for n in ("clipped", "lightened", "quarantined")]
    return f" Defence on in {len(on)} of {len(frame)} runs: {', '.join(words)} uploads per round of these."


def _total(run: Run, name: str) -> float:
    return float(run.curve[name].max()) if name in run.curve and run.curve[name].any() else 0.0


def at_table(frame: pd.DataFrame, rounds: Sequence[int]) -> Table:
    """Return the test accuracy after each of `rounds`; a dash where no run was evaluated then."""

    def row(group: pd.DataFrame) -> dict[str, str]:
        at = {f"round {n} %": percent([run.curve["accuracy"].get(n, np.nan) for run in group["run"]]) for n in rounds}
        return {**at, "seeds": str(len(group))}

    note = "Test accuracy of the global model in that round; mean ± sample standard deviation over seeds."
    return Table("After a round", per_group(frame, row), note, [f"round {number} %" for number in rounds])


def width_table(frame: pd.DataFrame) -> Table | None:
    """Return the last accuracy of the models of every width; None if all runs have one width."""
    widths = {str(name).removeprefix(WIDTH) for run in frame["run"] for name in run.curve if WIDTH in str(name)}
    if not widths:
        return None
    ordered = sorted(widths, key=lambda width: tuple(-float(part) for part in f"{width}@0".split("@")[:2]))

    def last(run: Run, width: str) -> float:
        known = run.curve.get(WIDTH + width, pd.Series(dtype=float)).dropna()
        return float(known.iloc[-1]) if len(known) else math.nan

    def row(group: pd.DataFrame) -> dict[str, str]:
        return {width: percent([last(run, width) for run in group["run"]]) for width in ordered}

    table = per_group(frame, row)
    table = table[(table[ordered] != DASH).any(axis=1)]
    note = "Test accuracy of the global model of every width at the last evaluation; mean ± standard deviation."
    if any("@" in width for width in ordered):
        note += " 0.4@2 keeps the first two groups of channels whole."
    return Table("Accuracy by width", table, note, ordered)


def default_target(frame: pd.DataFrame) -> list[float]:
    """Return the highest multiple of 5 % that every run reaches, in [0, 1]; none if guessing reaches it."""
    found = round(0.05 * math.floor(frame["best"].min() / 0.05 + 1e-9), 2)
    chance = [1 / len(run.info["class_accuracy"]) for run in frame["run"] if run.info.get("class_accuracy")]
    return [found] if found > max(chance, default=0) + 1e-9 else []


def target_table(frame: pd.DataFrame, targets: Sequence[float]) -> Table:
    """Return rounds, bytes and seconds until the test accuracy first is each target in [0, 1]."""

    def row(group: pd.DataFrame, target: float) -> dict[str, str]:
        reached = {x: pd.Series([run.reach(target, x) for run in group["run"]]) for x in ("rounds", "bytes", "seconds")}
        virtual = pd.Series([run.reach(target, "virtual") for run in group["run"]])
        rounds = reached["rounds"].dropna()
        spread = f" ± {rounds.std():.0f}" if len(rounds) > 1 else ""
        paper = published_rounds(group["run"].iloc[0].settings, target)
        return {
            "reached": f"{len(rounds)} of {len(group)}",
            "rounds": f"{rounds.mean():.0f}{spread}" if len(rounds) else "never",
            "bytes sent": size(reached["bytes"].mean() * 1e6),
            "time": duration(reached["seconds"].mean()),
            "virtual time": duration(virtual.mean()),
            "published rounds": f"{paper.value:g} ({paper.source})" if paper else DASH,
        }

    parts = []
    for target in targets:
        part = per_group(frame, lambda group, target=target: row(group, target))  # type: ignore[misc]
        part.insert(0, "target", f"{100 * target:g} %")
        parts.append(part)
    return Table("To a target accuracy", pd.concat(parts), "Means over the runs that reached the target.")


def published_table(frame: pd.DataFrame) -> Table | None:
    """Return the smoothed accuracy beside the published cells; None if no configuration has one."""
    rows = []
    for _, group in frame.groupby("group", sort=False):
        settings, mine = group["run"].iloc[0].settings, group["smoothed"]
        cells = pd.DataFrame([vars(cell) | {"cell": cell} for cell in accuracy_cells(settings)])
        for _, same in cells.groupby(["value", "spread"], dropna=False, sort=False) if len(cells) else []:
            cell = same["cell"].iloc[0]
            rows.append(
                {
                    "problem": group["problem"].iloc[0],
                    "method": group["method"].iloc[0],
                    "best mean of 10 %": percent(mine),
                    "seeds": str(len(mine)),
                    "published %": f"{cell.value:.2f}" + ("" if cell.spread is None else f" ± {cell.spread:.2f}"),
                    "difference": f"{100 * mine.mean() - cell.value:+.2f}",
                    "source": ", ".join(same["source"].unique()),
                    "differs from the paper": ", ".join(deviations(cell, settings)) or DASH,
                }
            )
    note = (
        "Beside the best mean of 10, because the papers' logger most likely reports that. "
        "The papers' ± is not known to be over seeds."
    )
    return Table("Beside the published numbers", pd.DataFrame(rows), note) if rows else None


def significance_table(frame: pd.DataFrame) -> Table | None:
    """Return the paired comparisons; None if no two configurations of a problem share two seeds."""
    found = compare(frame)
    if found.empty:
        return None
    text = found[["problem", "first", "second"]].copy()
    text["first - second, points"] = found["difference"].map(lambda value: f"{100 * value:+.2f}")
    text["95 % interval"] = [f"{100 * a:+.2f} to {100 * b:+.2f}" for a, b in zip(found["low"], found["high"])]
    text["n"] = found["n"].astype(str)
    for name, column in (("p (t)", "t"), ("p (t, Holm)", "holm"), ("p (Wilcoxon)", "wilcoxon")):
        text[name] = found[column].map(_p)
    note = (
        "Best mean of 10, paired by seed, two-sided; n is the number of shared seeds. The interval is Student's, "
        f"uncorrected; Holm's correction is within a problem. Wilcoxon's test needs {WILCOXON_FROM} pairs, the t-test "
        f"{T_FROM}. Up to {ALL_PAIRS} configurations of a problem are all compared; of more, each with the first that "
        "trains alike."
    )
    return Table("Paired over seeds", text, note)


def _p(value: float) -> str:
    return DASH if math.isnan(value) else "< 0.0001" if value < 1e-4 else f"{value:.4f}"


def ablation_tables(grids: Sequence[tuple[str, pd.DataFrame, pd.DataFrame]]) -> list[Table]:
    """Return alpha by selection for every grid, as smoothed accuracy in percent and the number of seeds."""
    tables = []
    for problem, values, seeds in grids:
        text = values.map(lambda value: DASH if pd.isna(value) else f"{100 * value:.2f}")
        text += seeds.map(lambda n: f" (n={n})" if n else "")
        text = text.rename_axis("alpha").reset_index().astype({"alpha": float})
        text["alpha"] = text["alpha"].map("{:g}".format)
        note = "Best mean of 10 evaluations, %; n is the number of seeds."
        tables.append(Table(f"Alpha and selection: {problem}", text, note))
    return tables


def console_table(runs: Sequence[Run]) -> Any:
    """Return a rich table for the terminal with one line per configuration; the best of each problem is bold."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table as RichTable

    from fedcross.analysis.labels import runs_frame

    frame, _ = runs_frame(runs)
    full = accuracy_table(frame).frame
    names = ["problem", "method", "final %", "best %", "best mean of 10 %", "seeds", "bytes sent", "time"]
    table = Table("", full[names]).compact().frame
    means = frame.groupby("group", sort=False).agg({"problem": "first", "smoothed": "mean"})
    rivals = means.groupby("problem")["smoothed"]
    best = (means["smoothed"] == rivals.transform("max")) & (rivals.transform("size") > 1)
    title = "Test accuracy of the global model, %"
    shown = RichTable(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in table:
        shown.add_column(str(name).removesuffix(" %"), justify="left" if name in ("problem", "method") else "right")
    for row, top in zip(table.to_numpy(), best, strict=True):
        shown.add_row(*row, style="bold" if top else None)
    return shown
