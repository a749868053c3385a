"""Which runs are seeds of one configuration, and what a table calls each configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from fedcross.analysis.runs import SWITCHES, Run, active

IGNORED = (
    "seed", "logger", "log", "serve", "hydra", "experiment", "output", "resume", "checkpoint", "snapshots",
    "federation.min_clients", "federation.wait_s", "federation.deadline_s", "federation.resend_s", "federation.packed",
    "federation.lead", "evaluate_clients", "evaluate_local", "data_root", "stop_at", "task.root", "task.download",
    "clock.events",
)  # fmt: skip
"""Settings and groups of settings that do not change the result."""

WHERE = ("engine", "device")
"""Where a run ran. These settings count only where one configuration and seed ran in several places."""

DATA = "data"
"""Digest of the examples of a run. It counts only where runs of one configuration have several."""

LENGTH = ("rounds", "evaluate_every")

PROBLEM = ("task.name", "model.name", "partition.name", "partition.beta", "devices.name", DATA)
"""Settings that define the problem. Runs of different problems are never drawn in one plot."""


def in_groups(name: str, groups: Sequence[str]) -> bool:
    """Return whether the setting `name` is one of `groups` or in one of them."""
    return any(name == group or name.startswith(f"{group}.") for group in groups)


def decisive(settings: Mapping[str, Any], ignored: Sequence[str] = IGNORED) -> dict[str, Any]:
    """Return the settings that decide the result."""
    return {name: value for name, value in active(settings).items() if not in_groups(name, ignored)}


def _key(settings: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return settings as a key; null, false and empty values count as absent, as in versions without the setting."""
    return tuple(sorted((name, text) for name, value in settings.items() if (text := _plain(value))))


def _plain(value: Any) -> str:
    if value is None or value is False or value in ("", ()):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def identity(run: Run, ignored: Sequence[str] = (*IGNORED, *WHERE)) -> tuple[tuple[str, str], ...]:
    """Return the configuration without the seed, as a key."""
    return _key(decisive(run.settings, ignored))


def data_of(run: Run) -> str | None:
    """Return the first digits of the digests of a run's data, if it says them."""
    data = run.info.get("data")
    return "-".join(str(digest)[:6] for digest in data.values()) if isinstance(data, dict) and data else None


def runs_frame(runs: Sequence[Run], but: Sequence[str] = ()) -> tuple[pd.DataFrame, list[str]]:
    """Return one tidy frame with a row for each run, and a sentence on each run left out as a duplicate.

    Columns: ``group`` (number of the configuration), ``problem``, ``panel`` (where problems differ), ``method`` (with
    the settings in which configurations of a problem differ), ``seed``, the numbers of :meth:`Run.measures`, and
    ``run``, the :class:`Run`. Ordered by problem, FedAvg first. `but` names settings that may differ in a group.
    """
    base = [identity(run, (*IGNORED, *WHERE, *but)) for run in runs]
    places = [_key({n: v for n, v in run.settings.items() if in_groups(n, WHERE)}) for run in runs]
    frame = pd.DataFrame({"base": base, "place": places, "data": map(data_of, runs), "seed": [r.seed for r in runs]})
    frame["run"] = list(runs)
    several_places = bool((frame.groupby(["base", "seed"])["place"].nunique() > 1).any())
    several_data = frame.groupby("base")["data"].transform("nunique") > 1
    frame["place"] = frame["place"] if several_places else None
    frame["data"] = frame["data"].where(several_data)
    frame["length"] = [run.rounds for run in runs]
    frame["path"] = [str(run.path) for run in runs]
    frame["order"] = range(len(frame))
    frame = frame.sort_values(["length", "order"], ascending=[False, True], kind="stable")
    keys = ["base", "place", "data"]
    twice = frame.duplicated([*keys, "seed"])
    kept = frame[~twice]
    notes = []
    for row in frame[twice].itertuples():
        same = kept[(kept["base"] == row.base) & (kept["seed"] == row.seed)]
        notes.append(f"left out {row.path}: same configuration and seed as {same['path'].iloc[0]}")
    kept = kept.sort_values("order")
    kept["group"] = kept.groupby(keys, dropna=False, sort=False).ngroup()
    ignored = (*IGNORED, *(() if several_places else WHERE), *but)
    firsts = kept.sort_values("seed", kind="stable").drop_duplicates("group").sort_values("group")
    settings = [
        decisive(row.run.settings, ignored) | ({DATA: row.data} if isinstance(row.data, str) else {})
        for row in firsts.itertuples()
    ]
    named = pd.DataFrame({"problem": map(problem, settings)})
    named["method"], named["panel"] = zip(*_labels(settings), strict=True)
    named["later"] = [values["method.name"] != "fedavg" for values in settings]
    named["group"] = firsts["group"].to_numpy()
    numbers = pd.DataFrame([run.measures() for run in kept["run"]], index=kept.index)
    full = kept[["group", "seed", "run"]].join(numbers).merge(named, on="group")
    full = full.sort_values(["problem", "later", "method", "group", "seed"], kind="stable").drop(columns="later")
    return full.reset_index(drop=True), notes


def problem(settings: Mapping[str, Any]) -> str:
    """Return the problem in words: task, model, partition."""
    words = [str(settings[name]) for name in PROBLEM[:3] if settings.get(name) is not None]
    if settings.get("partition.name") == "dirichlet" and settings.get("partition.beta") is not None:
        words[-1] += f" beta={settings['partition.beta']}"
    words += [f"devices {settings['devices.name']}"] if settings.get("devices.name") else []
    return ", ".join([*words, *([f"data {settings[DATA]}"] if settings.get(DATA) else [])])


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (method, panel) of each configuration.

    The method lists the settings that differ between configurations of the same problem; the panel lists those of the
    problem that differ between problems.
    """
    shown = [name for name in PROBLEM if _differs(name, settings)]
    labels = []
    for mine in settings:
        rivals = [other for other in settings if problem(other) == problem(mine)]
        names = sorted({name for other in rivals for name in other} - {"method.name"})
        differing = [name for name in names if _differs(name, rivals)]
        extra = [
            f"{_short(name, differing)}={mine[name]}"
            for name in differing
            if name not in PROBLEM and _plain(mine.get(name)) and _matters(name, mine, rivals)
        ]
        panel = [
            {"partition.beta": "beta=", DATA: "data="}.get(name, "") + str(mine[name])
            for name in shown
            if mine.get(name) is not None and _matters(name, mine, settings)
        ]
        labels.append((" ".join([str(mine["method.name"]), *extra]), ", ".join(panel)))
    return labels


def _differs(name: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    return len({_plain(other.get(name)) for other in settings}) > 1


def _matters(name: str, mine: Mapping[str, Any], settings: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether `mine` differs in `name` from another configuration with the same choice for its group.

    ``method.alpha`` distinguishes only runs of FedCross; the method's name already distinguishes FedCross from FedAvg.
    """
    group = name.split(".")[0]
    choice = SWITCHES[group][0] if group in SWITCHES else f"{group}.name"
    if name == choice or choice not in mine:
        return True
    return _differs(name, [other for other in settings if other.get(choice) == mine[choice]])


def _short(name: str, names: Sequence[str]) -> str:
    """Return the last part of a method's setting; the whole name where another of `names` ends the same."""
    last = name.split(".")[-1]
    if last == "name":
        return name.split(".")[0]
    unique = sum(other.split(".")[-1] == last for other in names) == 1
    return last if name.startswith("method.") and unique else name


def curve(group: pd.DataFrame, x: str = "rounds", column: str = "accuracy") -> pd.DataFrame:
    """Return columns ``x``, ``mean`` and ``std`` over the seeds of a group, for rounds where every run has a value."""
    runs: list[Run] = list(group["run"])
    values = pd.concat([run.curve.get(column, pd.Series(dtype=float)).dropna() for run in runs], axis=1, join="inner")
    places = pd.concat([run.axis(x).reindex(values.index) for run in runs], axis=1)
    std = values.std(axis=1) if len(runs) > 1 else 0.0
    return pd.DataFrame({"x": places.mean(axis=1, skipna=False), "mean": values.mean(axis=1), "std": std})
