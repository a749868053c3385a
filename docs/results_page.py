"""``python -m docs.results_page``: writes ``docs/results.md`` and its figures from ``results/``.

``results/page.md`` is the text. A line ``{{NAME ARGUMENTS}}`` becomes what the function NAME of :class:`Page` returns.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedcross.analysis.published import ACCURACY, verdicts
from fedcross.analysis.records import RUNS, load_runs
from fedcross.analysis.runs import LENGTH, WHERE, WIDTH, Run, in_groups, runs_frame

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"^\{\{(\w+) ?(.*)\}\}$", re.MULTILINE)
HIDDEN = re.compile(r" (?:partition|task|train|log)\.\S+?=(?:\([^)]*\)|\S+)")
"""Settings that the name of a run leaves out."""

VERDICTS = ("agrees", "differs", "too short", "other settings")
COLORS = {"fedavg": ("FedAvg", "#64748b"), "fedcross": ("FedCross", "#0f766e")}
GREY, AMBER = "#94a3b8", "#b45309"


class Page:
    """The records in `results`, and what the text may name; figures go to `images`."""

    def __init__(self, results: Path, images: Path) -> None:
        self.results, self.images = results, images
        self.cells = verdicts(load_runs([results])[0])

    def count(self) -> str:
        """Return how many published cells have which verdict."""
        counts = self.cells["verdict"].value_counts()
        told = ", ".join(f"{counts.get(name, 0)} {name}" for name in VERDICTS)
        return f"Of {len(self.cells)} published cells {(self.cells['seeds'] > 0).sum()} have a record: {told}."

    def table(self, source: str) -> str:
        """Return the cells of a table, or of all tables of a paper, one row each, and their figure."""
        cells = self.cells[[name == source or name.startswith(f"{source} Table") for name in self.cells["source"]]]
        shown = cells[cells["seeds"] > 0]
        names = _names(shown)
        rows = [_row(cell, name) for cell, name in zip(shown.to_dict("records"), names, strict=True)]
        parts = [_table(rows), f"{len(cells) - len(shown)} of {len(cells)} cells have no data here."]
        drawn = (shown["quantity"] == ACCURACY).to_numpy()
        unit = "test accuracy, %" if drawn.any() else "rounds"
        drawn = drawn | (not drawn.any())
        file = "cells-" + re.sub(r"\W+", "-", source.lower()) + ".png"
        kept = [name for name, yes in zip(names, drawn, strict=True) if yes]
        plot_cells(shown[drawn], kept, unit, self.images / file)
        parts.append(f"![{source}: published and measured](images/{file})")
        return "\n\n".join(parts)

    def runs(self, arguments: str) -> str:
        """Return a table of runs: ``TABLE+TABLE [until=ROUND] [target=PERCENT] [x=AXIS] [only=NAMES] [beta=LIST]``."""
        tables, *pairs = arguments.split()
        told = dict(pair.split("=", 1) for pair in pairs)
        frame = self.frame(tables, int(told["until"]) if "until" in told else None)
        betas = told.get("beta", "").split(",")
        keep = [
            re.fullmatch(told.get("only", ".*"), str(run.settings["method.name"])) is not None
            and ("beta" not in told or str(run.settings.get("partition.beta")) in betas)
            for run in frame["run"]
        ]
        target, x = float(told.get("target", 50)) / 100, told.get("x", "rounds")
        rows = [_run_row(group, target, x) for _, group in frame[keep].groupby("group", sort=False)]
        rows.sort(key=lambda row: (row["setting"], -float(row["best mean, %"].split()[0])))
        if len({row["setting"] for row in rows}) == 1:
            rows = [{key: value for key, value in row.items() if key != "setting"} for row in rows]
        return _table(rows)

    def means(self, arguments: str) -> str:
        """Return mean accuracies: ``TABLE+TABLE title=T down=NAME,.. across=NAME,.. from=SHARE``, and options.

        Each NAME is a setting. A cell is the mean over the evaluations of every tenth round after that share of the
        rounds, mean and deviation over the runs with these settings, which should differ in their seeds alone.
        Options: ``until`` is the last round; ``only`` a pattern for METHOD/OBJECTIVE, ``beta`` a list of betas that
        count; ``curve=C,C`` takes other curves than accuracy, the second one's mean in brackets.
        """
        tables, *pairs = arguments.split()
        told = dict(pair.split("=", 1) for pair in pairs)
        curves, found = told.get("curve", "accuracy").split(","), dict[str, dict[str, list[list[float]]]]()
        until = int(told["until"]) if "until" in told else None
        for run in load_runs([self.results / name for name in tables.split("+")], until=until)[0]:
            mine = run.settings
            beta, rules = str(mine.get("partition.beta")), f"{mine['method.name']}/{mine.get('objective.name', 'own')}"
            if beta not in told.get("beta", beta).split(",") or not re.fullmatch(told.get("only", ".*"), rules):
                continue
            down, across = (
                ", ".join(str(v) for n in told[way].split(",") if (v := mine.get(n, "none")) != "none")
                for way in ("down", "across")
            )
            late = run.curve.loc[float(told["from"]) * run.curve.index[-1] :]
            values = [100 * late.loc[late.index % 10 == 0, curve].mean() for curve in curves]
            found.setdefault(down, {}).setdefault(across, []).append(values)
        heads = sorted({across for row in found.values() for across in row})
        rows = []
        for down, row in sorted(found.items()):
            cells = dict.fromkeys(heads, "")
            for across, runs in row.items():
                first, *others = zip(*runs, strict=True)
                cells[across] = f"{np.mean(first):.1f}{_spread(first).replace(' ', '')}" + "".join(
                    f" ({np.mean(o):.1f})" for o in others
                )
            rows.append({told["title"].replace("_", " "): down} | cells)
        return _table(rows)

    def widths(self, tables: str) -> str:
        """Return the best mean of ten evaluations of every width's model; configurations with two seeds or more."""
        rows = []
        for _, group in self.frame(tables).groupby("group", sort=False):
            found = sorted({str(name) for run in group["run"] for name in run.curve if str(name).startswith(WIDTH)})
            widths: dict[str, str] = {}
            for name in found:  # accuracy@0.4 before accuracy@0.4@2, whose first two groups are whole
                widths.setdefault(name.split("@")[1], name)
            if len(widths) < 2 or len(group) < 2:
                continue
            row = {"method": _label(group), "network": str(group["problem"].iloc[0]).split(", ")[1]}
            for width, name in sorted(widths.items(), reverse=True):
                curves = [run.curve[name].dropna() for run in group["run"]]
                best = np.mean([curve.rolling(10, min_periods=1).mean().max() for curve in curves])
                row[f"width {width}"] = f"{100 * best:.1f}"
            rows.append(row | {"seeds": str(len(group)), "rounds": _rounds(group)})
        return _table(rows)

    def tables(self) -> str:
        """Return the list of all tables of records."""
        rows = []
        for table in sorted(file.parent for file in self.results.glob(f"*/{RUNS}")):
            runs, _ = load_runs([table])
            problems = {f"{run.settings['task.name']}, {run.settings['model.name']}" for run in runs}
            row = {"table": f"`{table.name}`", "runs": str(len(runs)), "longest": str(max(run.rounds for run in runs))}
            rows.append(row | {"task, model": "; ".join(sorted(problems))})
        return _table(rows)

    def frame(self, tables: str, until: int | None = None) -> pd.DataFrame:
        """Return the runs in `tables` (joined by +) whatever they ran on, lengths together."""
        runs, _ = load_runs([self.results / name for name in tables.split("+")], until=until)
        plain = [{n: v for n, v in run.settings.items() if not in_groups(n, WHERE)} for run in runs]
        return runs_frame([replace(r, settings=s) for r, s in zip(runs, plain, strict=True)], but=LENGTH)[0]


def _table(rows: Sequence[dict[str, str]]) -> str:
    heads = list(rows[0])
    lines = [" | ".join(heads), "---|" * len(heads), *(" | ".join(row.get(h, "") for h in heads) for row in rows)]
    return "\n".join(f"|{line}" if line.startswith("---") else f"| {line} |" for line in lines)


def _names(cells: pd.DataFrame) -> list[str]:
    """Return the names of cells: what differs between them."""
    parts = cells[["source", "model", "dataset"]].copy()
    parts["source"] = parts["source"].str.partition(" Table ")[2]
    parts["split"] = [
        f"beta {beta:g}" if isinstance(beta, float) and beta == beta else str(name)
        for beta, name in zip(cells["beta"], cells["partition"], strict=True)
    ]
    parts["method"], parts["variant"] = cells["method"], cells["variant"]
    parts["target"] = [f"to {100 * target:g} %" if target == target else "" for target in cells["target"].astype(float)]
    parts = parts.loc[:, parts.nunique() > 1]
    return [", ".join(text for text in row if text) for row in parts.itertuples(index=False)]


def _row(cell: dict[str, Any], name: str) -> dict[str, str]:
    planned, unit = cell["published_rounds"], ".1f" if cell["quantity"] == ACCURACY else ".0f"
    ours = "not reached" if np.isnan(cell["ours"]) else f"{cell['ours']:{unit}}"
    interval = "" if np.isnan(cell["low"]) else f" ({cell['low']:{unit}} to {cell['high']:{unit}})"
    row = {
        "cell": name,
        "paper": f"{cell['published']:{'.2f' if unit == '.1f' else unit}}",
        "here (95 % interval)": ours + interval,
    }
    row["less paper"] = "" if np.isnan(cell["difference"]) else f"{cell['difference']:+{unit}}"
    row["seeds"] = str(cell["seeds"])
    row["rounds"] = f"{cell['rounds']:.0f}" + (f" of {planned:.0f}" if planned == planned and planned else "")
    return {**row, "verdict": cell["verdict"]}


def _run_row(group: pd.DataFrame, target: float, x: str) -> dict[str, str]:
    best = 100 * group["smoothed"]
    reach = pd.Series([run.reach(target, x) for run in group["run"]]) / (1 if x == "rounds" else 3600)
    unit = "rounds" if x == "rounds" else "virtual hours"
    reached = f"{reach.mean():.{0 if x == 'rounds' else 1}f}" if reach.notna().all() else "not reached"
    return {
        "setting": ", ".join(str(group["problem"].iloc[0]).split(", ")[2:]),
        "method": _label(group),
        "seeds": str(len(group)),
        "rounds": _rounds(group),
        "best mean, %": f"{best.mean():.1f}{_spread(best)}",
        f"{unit} to {100 * target:g} %": reached,
    }


def _spread(values: Sequence[float]) -> str:
    return f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""


def _rounds(group: pd.DataFrame) -> str:
    low, high = (pick(run.rounds for run in group["run"]) for pick in (min, max))
    return str(low) if low == high else f"{low} to {high}"


def _label(group: pd.DataFrame) -> str:
    return HIDDEN.sub("", str(group["method"].iloc[0]))


def plot_cells(cells: pd.DataFrame, names: Sequence[str], unit: str, path: Path) -> None:
    """Draw published values (diamonds) and measured ones (dots with 95 % intervals), a row for each cell."""
    axes = (figure := Figure(figsize=(8, 1.2 + 0.2 * len(cells)), layout="constrained")).subplots()
    rows = np.arange(len(cells))[::-1]
    long = cells["verdict"].isin(["agrees", "differs"]).to_numpy()
    low, high = (cells["ours"] - cells["low"]).fillna(0), (cells["high"] - cells["ours"]).fillna(0)
    for kept, color, label in (
        (long, COLORS["fedcross"][1], "measured"),
        (~long, GREY, "too short, or other settings"),
    ):
        if kept.any():
            bars = np.vstack([low[kept], high[kept]])
            axes.errorbar(cells["ours"][kept], rows[kept], xerr=bars, fmt="o", color=color, label=label, markersize=4)
    axes.plot(cells["published"], rows, "D", markerfacecolor="none", color=AMBER, label="published", markersize=5)
    axes.set_yticks(rows, names, fontsize=7)
    axes.set_xlabel(unit)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside upper center", ncols=3, fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


def plot_start(runs: Sequence[Run], path: Path) -> None:
    """Draw FedAvg and FedCross: mean of ten evaluations, mean and range over the seeds of `runs`."""
    axes = (figure := Figure(figsize=(8, 3.4), layout="constrained")).subplots()
    for method, (name, color) in COLORS.items():
        chosen = [run for run in runs if run.settings["method.name"] == method]
        seeds = pd.DataFrame({run.seed: 100 * run.accuracy for run in chosen}).rolling(10, min_periods=1).mean()
        axes.fill_between(seeds.index, seeds.min(axis=1), seeds.max(axis=1), color=color, alpha=0.25, linewidth=0)
        axes.plot(seeds.index, seeds.mean(axis=1), color=color, label=f"{name}, {len(chosen)} seeds")
    axes.set(xlabel="round", ylabel="test accuracy, %", xlim=(0, None))
    axes.set_title("CIFAR-10, LeNet-5, Dirichlet 0.1: mean and range over seeds", fontsize=10)
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def write(results: Path, docs: Path) -> str:
    """Write the page and its figures, and return the page."""
    (docs / "images").mkdir(parents=True, exist_ok=True)
    page = Page(results, docs / "images")

    def filled(found: re.Match[str]) -> str:
        function = getattr(page, found[1])
        return str(function(found[2]) if found[2] else function())

    text = MARK.sub(filled, (results / "page.md").read_text(encoding="utf-8"))
    (docs / "results.md").write_text(text, encoding="utf-8")
    return text


def write_start(results: Path, path: Path) -> None:
    """Write the curve of the README: three seeds, 1,000 rounds."""
    runs, _ = load_runs([results / "cifar10-beta01"])
    long = [run.until(1000) for run in runs if run.rounds >= 1000 and run.settings["method.name"] in COLORS]
    plot_start(long, path)


if __name__ == "__main__":
    write(ROOT / "results", ROOT / "docs")
    write_start(ROOT / "results", ROOT / "docs" / "images" / "curve-cifar10.png")
