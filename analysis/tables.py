"""The tables of a report, made from the tidy frame of :func:`fedcross.analysis.runs.runs_frame`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fedcross.analysis.published import accuracy_cells, deviations, published_rounds
from fedcross.analysis.runs import WIDTH, flatten
from fedcross.analysis.significance import ALL_PAIRS, T_FROM, WILCOXON_FROM, compare
from fedcross.analysis.table import DASH, Table, duration, percent, size

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
"""Column of :func:`metrics_table` -> its name in ``result.json``."""
Columns = dict[str, tuple[str, str | Callable[[Any], str]]]
"""Column of a table -> column of the frame of runs, and what makes a text of a group's values."""
SEEDS: tuple[str, Callable[[Any], str]] = ("seed", lambda seeds: str(len(seeds)))


def per_group(frame: pd.DataFrame, columns: Columns) -> pd.DataFrame:
    """Return problem, method and `columns` of each group."""
    head: Columns = {"problem": ("problem", "first"), "method": ("method", "first")}
    return frame.groupby("group", sort=False).agg(**(head | columns)).reset_index(drop=True)


def percents(frame: pd.DataFrame, values: Mapping[str, Sequence[float]]) -> pd.DataFrame:
    """Return problem, method and the percent of each of `values`: column -> a share in [0, 1] for each run."""
    return per_group(frame.assign(**values), {name: (name, percent) for name in values})


def rounds_done(runs: pd.Series[Any]) -> str:
    """Return the rounds of a group's runs; ``37 of 100`` for an unfinished run."""
    done = sorted({run.rounds for run in runs})
    text = str(done[0]) if len(done) == 1 else f"{done[0]}–{done[-1]}"
    planned = runs.iloc[0].settings.get("rounds")
    return text if planned is None or not any(run.note for run in runs) else f"{text} of {planned}"


def accuracy_table(frame: pd.DataFrame) -> Table:
    """Return final, best and smoothed accuracy, bytes and seconds of every configuration."""
    columns: Columns = {
        "final %": ("final", percent), "best %": ("best", percent), "best mean of 10 %": ("smoothed", percent),
        "± in window": ("window_std", lambda std: f"{100 * std.mean():.2f}"), "last ten %": ("last_ten", percent),
        "seeds": SEEDS, "rounds": ("run", rounds_done), "bytes sent": ("bytes", size), "time": ("seconds", duration),
    }  # fmt: skip
    table = per_group(frame, columns)
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
    return Table("Accuracy", table, note + defence_note(frame), [name for name in table if name.endswith("%")])


def defence_note(frame: pd.DataFrame) -> str:
    """Return in how many runs the defence was on, and what it did per round; empty if in none."""
    on = [run for run in frame["run"] if run.settings.get("defence.enabled")]
    if not on:
        return ""
    names, rounds = ("clipped", "lightened", "quarantined"), sum(run.rounds for run in on)
    totals = [np.nan_to_num(sum(run.column(name).max() for run in on)) for name in names]
    words = ", ".join(f"{total / rounds:.3g} {name}" for name, total in zip(names, totals))
    return f" Defence on in {len(on)} of {len(frame)} runs: {words} uploads per round of these."


def metrics_table(frame: pd.DataFrame) -> Table | None:
    """Return the metrics beside the test accuracy that some run has; None if none has one."""
    infos = pd.DataFrame([flatten(run.info) for run in frame["run"]])
    known = {column: infos[name] for column, name in METRICS.items() if name in infos and infos[name].notna().any()}
    if not known:
        return None
    note = (
        "Of the final global model, in percent; mean ± standard deviation over seeds. Accuracy below the share of the "
        "larger class is worse than guessing. Clients are scored on their own test data; spread is over clients."
    )
    best = [name for name in known if name.endswith("%") and not name.startswith("larger")]
    values = {name: column.astype(float).tolist() for name, column in known.items()}
    return Table("Other metrics", percents(frame, values), note, best)


def clients_table(frame: pd.DataFrame) -> Table | None:
    """Return a row for each named client with the global model's accuracy there; None if no client has a name."""
    found = [
        {"problem": problem, "method": method, "client": run.info["client_names"][int(client)], "accuracy": accuracy}
        for problem, method, run in zip(frame["problem"], frame["method"], frame["run"], strict=True)
        for client, accuracy in (run.info.get("client_accuracy") or {}).items()
        if int(client) < len(run.info.get("client_names") or ())
    ]
    if not found:
        return None
    wide = pd.DataFrame(found).pivot_table("accuracy", ["problem", "client"], "method", aggfunc=percent, sort=False)
    note = "Test accuracy of the final global model on each client's own test data, %; mean ± deviation over seeds."
    return Table("Clients", wide.fillna(DASH).reset_index().rename_axis(columns=None), note)


def at_table(frame: pd.DataFrame, rounds: Sequence[int]) -> Table:
    """Return the test accuracy after each of `rounds`; a dash where no run was evaluated then."""
    at = {f"round {n} %": [run.curve["accuracy"].get(n, np.nan) for run in frame["run"]] for n in rounds}
    table = per_group(frame.assign(**at), {**{name: (name, percent) for name in at}, "seeds": SEEDS})
    note = "Test accuracy of the global model in that round; mean ± sample standard deviation over seeds."
    return Table("After a round", table, note, tuple(at))


def width_table(frame: pd.DataFrame) -> Table | None:
    """Return the last accuracy of the models of every width; None if all runs have one width."""
    widths = {str(name).removeprefix(WIDTH) for run in frame["run"] for name in run.curve if WIDTH in str(name)}
    if not widths:
        return None
    ordered = sorted(widths, key=lambda width: tuple(-float(part) for part in f"{width}@0".split("@")[:2]))
    last = {width: [run.column(WIDTH + width).ffill().iloc[-1] for run in frame["run"]] for width in ordered}
    table = percents(frame, last)
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
    parts = []
    for target in targets:
        axes = ("rounds", "bytes", "seconds", "virtual")
        reached = {x: [run.reach(target, x) for run in frame["run"]] for x in axes}
        papers = [published_rounds(run.settings, target) for run in frame["run"]]
        paper = [f"{cell.value:g} ({cell.source})" if cell else DASH for cell in papers]
        columns: Columns = {
            "reached": ("rounds", lambda rounds: f"{rounds.notna().sum()} of {len(rounds)}"),
            "rounds": ("rounds", _mean_rounds), "bytes sent": ("bytes", lambda megabytes: size(megabytes * 1e6)),
            "time": ("seconds", duration), "virtual time": ("virtual", duration),
            "published rounds": ("paper", "first"),
        }  # fmt: skip
        part = per_group(frame.assign(**reached, paper=paper), columns)
        part.insert(0, "target", f"{100 * target:g} %")
        parts.append(part)
    return Table("To a target accuracy", pd.concat(parts), "Means over the runs that reached the target.")


def _mean_rounds(rounds: pd.Series[float]) -> str:
    known = rounds.dropna()
    return (f"{known.mean():.0f}" + (f" ± {known.std():.0f}" if len(known) > 1 else "")) if len(known) else "never"


def published_table(frame: pd.DataFrame) -> Table | None:
    """Return the smoothed accuracy beside the published cells; None if no configuration has one."""
    rows = []
    for _, group in frame.groupby("group", sort=False):
        settings, mine = group["run"].iloc[0].settings, group["smoothed"]
        alike: dict[tuple[float, float | None], list[Any]] = {}
        for cell in accuracy_cells(settings):
            alike.setdefault((cell.value, cell.spread), []).append(cell)
        rows += [
            {
                "problem": group["problem"].iloc[0],
                "method": group["method"].iloc[0],
                "best mean of 10 %": percent(mine),
                "seeds": str(len(mine)),
                "published %": f"{value:.2f}" + ("" if spread is None else f" ± {spread:.2f}"),
                "difference": f"{100 * mine.mean() - value:+.2f}",
                "source": ", ".join(dict.fromkeys(cell.source for cell in same)),
                "differs from the paper": ", ".join(deviations(same[0], settings)) or DASH,
            }
            for (value, spread), same in alike.items()
        ]
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
        text[name] = found[column].map(lambda p: DASH if math.isnan(p) else "< 0.0001" if p < 1e-4 else f"{p:.4f}")
    note = (
        "Best mean of 10, paired by seed, two-sided; n is the number of shared seeds. The interval is Student's, "
        f"uncorrected; Holm's correction is within a problem. Wilcoxon's test needs {WILCOXON_FROM} pairs, the t-test "
        f"{T_FROM}. Up to {ALL_PAIRS} configurations of a problem are all compared; of more, each with the first that "
        "trains alike."
    )
    return Table("Paired over seeds", text, note)


def ablation_tables(grids: Sequence[tuple[str, pd.DataFrame, pd.DataFrame]]) -> list[Table]:
    """Return alpha by selection for every grid, as smoothed accuracy in percent and the number of seeds."""
    tables = []
    for problem, values, seeds in grids:
        text = values.map(lambda value: DASH if pd.isna(value) else f"{100 * value:.2f}")
        text += seeds.map(lambda n: f" (n={n})" if n else "")
        text = text.rename(index="{:g}".format).rename_axis("alpha").reset_index()
        note = "Best mean of 10 evaluations, %; n is the number of seeds."
        tables.append(Table(f"Alpha and selection: {problem}", text, note))
    return tables
