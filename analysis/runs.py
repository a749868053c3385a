"""Runs: settings, a frame of rounds, numbers; which runs are seeds of one configuration, and what tables call it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedcross.tasks.accuracies import Smoothed, smoothed

WIDTH = "accuracy@"
"""Start of a column with the accuracy of one width of the model; the width follows."""

AXES = {
    "rounds": "round",
    "bytes": "bytes sent, both directions (MB)",
    "epochs": "local epochs of one sampled client",
    "seconds": "seconds",
    "exchanges": "model exchanges",
    "virtual": "virtual seconds",
    "visits": "visits to clients",
}
"""Name of each possible x-axis, with its title."""


Settings = Mapping[str, Any]

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

SWITCHES = {
    "defence": ("defence.enabled", False),
    "attack": ("attack.name", "none"),
    "clock": ("clock.name", "none"),
    "privacy": ("privacy.enabled", False),
}
"""Groups of settings without effect while their switch is off."""


class BadRunError(Exception):
    """A folder that cannot be used; the message is the reason. Not raised outside this module."""


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes
    ----------
    path : Path
        Its folder, or ``TABLE/NAME`` for a record.
    settings : mapping
        The configuration with dotted names; lists are tuples.
    curve : DataFrame
        Indexed by round. Columns ``accuracy`` and ``loss`` on the test data (NaN where not evaluated), the cumulative
        ``bytes``, ``seconds``, ``exchanges``, ``epochs``, ``visits``, ``virtual_seconds``, and further metrics.
    info : mapping
        ``result.json``, or the record's line; empty for a run that has not ended.
    note : str
        Empty for a complete run, otherwise what is missing.
    """

    path: Path
    settings: Mapping[str, Any]
    curve: pd.DataFrame
    info: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.settings.get("seed", 0))

    @property
    def rounds(self) -> int:
        """The last round."""
        return int(self.curve.index[-1])

    @property
    def accuracy(self) -> pd.Series[float]:
        """Test accuracies in [0, 1] of the evaluated rounds, by round."""
        return self.curve["accuracy"].dropna()

    @property
    def smoothed(self) -> Smoothed:
        """The papers' smoothed accuracy: the best mean of ten evaluations."""
        return smoothed(self.accuracy.to_numpy(float))

    @property
    def cadence(self) -> int:
        """The most frequent number of rounds between two evaluations; 0 for fewer than two."""
        apart = pd.Series(np.diff(self.accuracy.index)).mode()
        return int(apart.iloc[0]) if len(apart) else 0

    def column(self, name: str) -> pd.Series[float]:
        """Return a column of the curve, NaN where the run has none."""
        return self.curve.get(name, pd.Series(np.nan, self.curve.index))

    def axis(self, x: str) -> pd.Series[float]:
        """Return the position of every round on the axis `x` (a key of :data:`AXES`); bytes in MB."""
        if x == "rounds":
            return self.curve.index.to_series().astype(float)
        found = self.column("virtual_seconds" if x == "virtual" else x)
        return found / 1e6 if x == "bytes" else found

    def reach(self, target: float, x: str = "rounds") -> float:
        """Return where on axis `x` the test accuracy first is at least `target` in [0, 1]; NaN if never."""
        hits = self.accuracy.index[self.accuracy >= target]
        return float(self.axis(x)[hits[0]]) if len(hits) else np.nan

    def measures(self) -> dict[str, float]:
        """Return the numbers of the accuracy table; accuracies in [0, 1]."""
        accuracy, best_mean = self.accuracy, self.smoothed
        return {
            "final": accuracy.iloc[-1],
            "best": accuracy.max(),
            "smoothed": best_mean.mean,
            "window_std": best_mean.std,
            "window": best_mean.window,
            "last_ten": accuracy.iloc[-10:].mean(),
            "bytes": self.curve["bytes"].iloc[-1],
            "seconds": self.curve["seconds"].iloc[-1],
        }

    def until(self, last: int) -> Run:
        """Return this run as if it had been planned for `last` rounds."""
        if self.rounds <= last and self.settings.get("rounds", last) <= last:
            return self
        curve = self.curve.loc[:last]
        note = "" if len(curve) and curve.index[-1] == last else self.note
        return replace(self, curve=curve, settings={**self.settings, "rounds": last}, note=note)

    def every(self, interval: int) -> Run:
        """Return this run as if it had been evaluated every `interval` rounds; BadRunError if it was not then."""
        if not set(range(interval, self.rounds + 1, interval)) <= set(self.accuracy.index):
            raise BadRunError(f"not evaluated every {interval} rounds")
        measured = [name for name in self.curve if name in ("accuracy", "loss") or str(name).startswith(WIDTH)]
        curve = self.curve.copy()
        curve.loc[curve.index % interval != 0, measured] = np.nan
        return replace(self, curve=curve, settings={**self.settings, "evaluate_every": interval})


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one with dotted names; lists become tuples."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = hashable(value)
    return flat


def hashable(value: Any) -> Any:
    """Return lists, also inside lists, as tuples."""
    return tuple(map(hashable, value)) if isinstance(value, list) else value


def in_groups(name: str, groups: Sequence[str]) -> bool:
    """Return whether the setting `name` is one of `groups` or in one of them."""
    return any(name == group or name.startswith(f"{group}.") for group in groups)


def decisive(settings: Settings, ignored: Sequence[str] = IGNORED) -> dict[str, Any]:
    """Return the settings that decide the result: without `ignored` ones, and groups that are switched off."""
    idle = [group for group, (name, off) in SWITCHES.items() if settings.get(name, off) == off]
    if settings.get("clock.name") != "virtual" and not settings.get("method.widths"):
        idle.append("devices")
    switches = {name for name, _ in SWITCHES.values()}
    return {
        name: value
        for name, value in settings.items()
        if (name in switches or name.split(".")[0] not in idle) and not in_groups(name, ignored)
    }


def _key(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Return settings as a key; null, false and empty values count as absent, as in versions without the setting."""
    return tuple(sorted((name, text) for name, value in settings.items() if (text := _plain(value))))


def _plain(value: Any) -> str:
    if value is None or value is False or value in ("", ()):
        return ""
    return f"{value:g}" if isinstance(value, float) else str(value)


def identity(run: Run, ignored: Sequence[str] = (*IGNORED, *WHERE)) -> tuple[tuple[str, str], ...]:
    """Return the configuration without the seed, as a key."""
    return _key(decisive(run.settings, ignored))


def runs_frame(runs: Sequence[Run], but: Sequence[str] = ()) -> tuple[pd.DataFrame, list[str]]:
    """Return one tidy frame with a row for each run, and a sentence on each run left out as a duplicate.

    Columns: ``group`` (number of the configuration), ``problem``, ``method`` (with the settings in which
    configurations of a problem differ), ``seed``, the numbers of :meth:`Run.measures`, and ``run``, the :class:`Run`.
    Ordered by problem, FedAvg first. `but` names settings that may differ in a group.
    """
    frame = pd.DataFrame({"run": list(runs), "seed": [run.seed for run in runs]})
    frame["base"] = [identity(run, (*IGNORED, *WHERE, *but)) for run in runs]
    frame["place"] = [_key({n: v for n, v in run.settings.items() if in_groups(n, WHERE)}) for run in runs]
    digests = [run.info.get("data") or {} for run in runs]
    frame["data"] = ["-".join(str(one)[:6] for one in found.values()) or None for found in digests]
    moved = bool((frame.groupby(["base", "seed"])["place"].nunique() > 1).any())
    frame["place"] = frame["place"] if moved else None
    frame["data"] = frame["data"].where(frame.groupby("base")["data"].transform("nunique") > 1)
    keys = ["base", "place", "data"]
    ranked = frame.assign(short=[-run.rounds for run in runs]).sort_values("short", kind="stable")  # the longest counts
    twice = ranked.duplicated([*keys, "seed"])
    kept = frame.loc[ranked.index[~twice]].sort_index()
    notes = []
    for row in ranked[twice].itertuples():
        same = ranked[~twice & (ranked["base"] == row.base) & (ranked["seed"] == row.seed)]["run"].iloc[0]
        notes.append(f"left out {row.run.path}: same configuration and seed as {same.path}")
    kept["group"] = kept.groupby(keys, dropna=False, sort=False).ngroup()
    ignored = (*IGNORED, *(() if moved else WHERE), *but)
    firsts = kept.sort_values("seed", kind="stable").drop_duplicates("group").sort_values("group")
    settings = [
        decisive(row.run.settings, ignored) | ({DATA: row.data} if isinstance(row.data, str) else {})
        for row in firsts.itertuples()
    ]
    named = pd.DataFrame({"group": firsts["group"].to_numpy(), "problem": map(problem, settings)})
    named["method"] = _labels(settings, named["problem"])
    named["later"] = [values["method.name"] != "fedavg" for values in settings]
    numbers = pd.DataFrame([run.measures() for run in kept["run"]], index=kept.index)
    full = kept[["group", "seed", "run"]].join(numbers).merge(named, on="group")
    full = full.sort_values(["problem", "later", "method", "group", "seed"], kind="stable").drop(columns="later")
    return full.reset_index(drop=True), notes


def problem(settings: Settings) -> str:
    """Return the problem in words: task, model, partition."""
    words = [str(settings[name]) for name in PROBLEM[:3] if settings.get(name) is not None]
    if settings.get("partition.name") == "dirichlet" and settings.get("partition.beta") is not None:
        words[-1] += f" beta={settings['partition.beta']}"
    words += [f"devices {settings['devices.name']}"] if settings.get("devices.name") else []
    return ", ".join([*words, *([f"data {settings[DATA]}"] if settings.get(DATA) else [])])


def _labels(settings: Sequence[Settings], problems: pd.Series[str]) -> pd.Series[str]:
    """Return the method of each configuration, with the settings in which those of its problem differ.

    A setting counts only if it differs among configurations with the same choice for its group: ``method.alpha``
    distinguishes runs of FedCross; the method's name already distinguishes FedCross from FedAvg.
    """
    labels = pd.Series("", problems.index)
    table = pd.DataFrame([{name: _plain(value) for name, value in mine.items()} for mine in settings]).fillna("")
    for _, rivals in table.groupby(problems):
        differing = sorted(set(rivals.columns[rivals.nunique() > 1]) - {"method.name", *PROBLEM})
        ends = Counter(name.split(".")[-1] for name in rivals.columns[rivals.nunique() > 1])
        for place in rivals.index:
            mine = settings[place]
            words = [str(mine["method.name"])]
            for name in differing:
                group, last = name.split(".")[0], name.split(".")[-1]
                choice = SWITCHES[group][0] if group in SWITCHES else f"{group}.name"
                alike = rivals[rivals[choice] == _plain(mine[choice])] if choice in mine and name != choice else rivals
                if _plain(mine.get(name)) and alike[name].nunique() > 1:
                    short = last if name.startswith("method.") and ends[last] == 1 else name
                    words.append(f"{group if last == 'name' else short}={mine[name]}")
            labels[place] = " ".join(words)
    return labels


def curve(group: pd.DataFrame, x: str = "rounds", column: str = "accuracy") -> pd.DataFrame:
    """Return columns ``x``, ``mean`` and ``std`` over the seeds of a group, for rounds where every run has a value."""
    runs: list[Run] = list(group["run"])
    values = pd.concat([run.column(column).dropna() for run in runs], axis=1, join="inner")
    places = pd.concat([run.axis(x).reindex(values.index) for run in runs], axis=1)
    std = values.std(axis=1) if len(runs) > 1 else 0.0
    return pd.DataFrame({"x": places.mean(axis=1, skipna=False), "mean": values.mean(axis=1), "std": std})
