"""Groups the runs of one configuration over seeds; labels each group with the settings that differ between groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedcross.analysis.runs import Curve, Run

IGNORED = (
    "seed", "logger", "log", "serve", "hydra", "experiment", "output", "resume", "checkpoint", "snapshots",
    "federation.min_clients", "federation.wait_s", "federation.deadline_s", "federation.resend_s", "federation.packed",
    "data_root", "stop_at", "task.root", "task.download", "clock.events",
)  # fmt: skip
"""Settings and groups of settings that do not change the result; they are not part of a configuration's identity."""

USUAL = {"federation.min_replies": 1, "federation.reassign": 0, "federation.hedge": 0, "federation.lead": 3.0}
"""Values that stand for a setting's absence: a run without them is the same run."""

WHERE = ("engine", "device")
"""Settings of where a run ran. The result does not depend on them by design, so seeds from several machines form one
group. If the same seed ran in two places, the runs compare the places, and these settings count."""

VISITS = "clock.visits"
"""Digest of the visits that a run with ``clock=real`` or ``replay`` has made; they decide its result. Each seed has its
own, so they count as a setting only where runs of one configuration and seed have several."""

DATA = "data"
"""Digests of the examples that a run has learned from and was tested with, where its result says them. They count as a
setting, of the problem, only where runs of one configuration have several."""

CHANGES = "changed"
"""Settings that a run changed when it was continued, by its result, in words; its configuration has the last ones."""

PANEL = ("task.name", "model.name", "partition.name", "partition.beta", "devices.name", DATA)
"""Settings that define the problem. Runs of different problems are never drawn in one plot."""

PANEL_NAMED = {"partition.beta": "beta=", DATA: "data="}
"""What stands before those of these settings that do not speak for themselves."""


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (divisor n - 1) over seeds; std is nan for one seed."""

    mean: float
    std: float
    n: int


def spread(values: Sequence[float]) -> Spread:
    """Return mean and spread of the values that are not nan."""
    known = [v for v in values if not math.isnan(v)]
    if not known:
        return Spread(math.nan, math.nan, 0)
    return Spread(float(np.mean(known)), float(np.std(known, ddof=1)) if len(known) > 1 else math.nan, len(known))


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed.

    Attributes
    ----------
    method : str
        The method, and those of its settings in which groups differ: ``fedcross alpha=0.99``.
    panel : str
        The part of the problem in which groups differ: ``cifar10, dirichlet beta=0.5``; empty if there is one.
    problem : str
        The full problem: ``cifar10, cnn, dirichlet beta=0.5``.
    runs : list of Run
        Ordered by seed.
    """

    method: str
    panel: str
    problem: str
    runs: list[Run]

    @property
    def label(self) -> str:
        """The label that distinguishes this group from the others."""
        return f"{self.method} ({self.panel})" if self.panel else self.method

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the first run; the others differ only in the seed."""
        return self.runs[0].settings

    @property
    def finished(self) -> bool:
        """Whether all runs reached their last round."""
        return all(run.finished for run in self.runs)

    def over_seeds(self, value: Callable[[Run], float]) -> Spread:
        """Return mean and spread over the runs of a number computed for each run."""
        return spread([value(run) for run in self.runs])

    def curve(self, x: str, column: str = "test_accuracy") -> tuple[Curve, Curve, Curve]:
        """Return x, mean and spread of a column over the rounds where every run has a value.

        Returns
        -------
        x, mean, std : arrays of float, shape (points,)
            x is the mean over seeds (bytes and seconds differ between runs); std is 0 for one seed.
        """
        per_run = [
            {int(r): (at, y) for r, at, y in zip(run.axis("rounds"), run.axis(x), run.column(column)) if y == y}
            for run in self.runs
        ]
        common = sorted(set.intersection(*(set(points) for points in per_run)))
        cube = np.array([[points[r] for r in common] for points in per_run]).reshape(len(per_run), len(common), 2)
        mean = cube.mean(axis=0)
        std = cube[:, :, 1].std(axis=0, ddof=1) if len(per_run) > 1 else np.zeros(len(common))
        return mean[:, 0], mean[:, 1], std


def counts(name: str, ignored: Sequence[str] = IGNORED) -> bool:
    """Whether the setting with dotted name `name` is part of a configuration's identity."""
    return not any(name == other or name.startswith(f"{other}.") for other in ignored)


def decisive(settings: Mapping[str, Any], ignored: Sequence[str]) -> dict[str, Any]:
    """Return the settings that are part of a configuration's identity.

    A setting that is null, or has the value in :data:`USUAL`, is not there: older runs lack those of later versions.
    """
    return {k: v for k, v in settings.items() if v is not None and v != USUAL.get(k) and counts(k, ignored)}


def identity(run: Run, ignored: Sequence[str] = IGNORED + WHERE) -> tuple[tuple[str, Any], ...]:
    """Return the configuration in hashable form, without the seed and settings that do not change the result."""
    kept = decisive(run.settings, ignored)
    return tuple(sorted((k, str(v) if isinstance(v, (tuple, dict)) else v) for k, v in kept.items()))


def _compares_places(runs: Sequence[Run]) -> bool:
    """Whether one configuration and seed ran in two places."""
    places: dict[object, set[object]] = {}
    for run in runs:
        usual = identity(run, (*IGNORED, *WHERE, VISITS))
        places.setdefault((usual, run.seed), set()).add(identity(run, (*IGNORED, VISITS)))
    return any(len(found) > 1 for found in places.values())


def _by_data(runs: Sequence[Run], ignored: Sequence[str]) -> list[Run]:
    """Return the runs, without their data where all of a configuration that say theirs have the same."""
    found: dict[object, set[object]] = {}
    for run in runs:
        found.setdefault(identity(run, (*ignored, DATA, VISITS)), set()).add(run.settings.get(DATA))
    several = {key for key, data in found.items() if len(data - {None}) > 1}
    return [run if identity(run, (*ignored, DATA, VISITS)) in several else _without(run, DATA) for run in runs]


def _without(run: Run, name: str) -> Run:
    return replace(run, settings={known: value for known, value in run.settings.items() if known != name})


def _by_visits(runs: Sequence[Run], ignored: Sequence[str]) -> list[Run]:
    """Return the runs, without their visits where those of one seed of a configuration are the same."""
    found: dict[object, dict[int | None, set[object]]] = {}
    for run in runs:
        seeds = found.setdefault(identity(run, (*ignored, VISITS)), {})
        seeds.setdefault(run.seed, set()).add(run.settings.get(VISITS))
    several = {key for key, seeds in found.items() if any(len(visits) > 1 for visits in seeds.values())}
    return [run if identity(run, (*ignored, VISITS)) in several else _without(run, VISITS) for run in runs]


LENGTH = ("rounds", "evaluate_every")
"""How long a run is and how often it was evaluated: runs that differ in nothing else are seeds of one curve."""


def group_runs(runs: Sequence[Run], but: Sequence[str] = ()) -> tuple[list[Group], list[str]]:
    """Group `runs` by configuration minus seed.

    Parameters
    ----------
    runs : sequence of Run
    but : sequence of str
        Other settings in which the runs of a group may differ.

    Returns
    -------
    groups : list of Group
        Ordered by problem; FedAvg first, then by name.
    notes : list of str
        A sentence for each run left out because another run has the same configuration and seed.
    """
    notes: list[str] = []
    runs = _by_data(runs, (*IGNORED, *WHERE, *but))
    ignored = (*IGNORED, *(() if _compares_places(runs) else WHERE), *but)
    cells: dict[tuple[tuple[str, Any], ...], dict[int | None, Run]] = {}
    for run in _by_visits(runs, ignored):
        seeds = cells.setdefault(identity(run, ignored), {})
        kept = run
        if run.seed in seeds:
            dropped, kept = _by_length(seeds[run.seed], run)
            notes.append(f"left out {dropped.path}: same configuration and seed as {kept.path}")
        seeds[run.seed] = kept
    members = [[seeds[s] for s in sorted(seeds, key=lambda s: (s is None, s or 0))] for seeds in cells.values()]
    labels = _labels([decisive(m[0].settings, ignored) for m in members])
    groups = [Group(method, panel, problem(m[0].settings), m) for m, (method, panel) in zip(members, labels)]
    return sorted(groups, key=lambda g: (g.problem, g.settings["method.name"] != "fedavg", g.method)), notes


def _by_length(a: Run, b: Run) -> tuple[Run, Run]:
    """Return the two runs, first the one with fewer rounds (with equal rounds, the earlier path)."""
    return (a, b) if len(a.columns["round"]) <= len(b.columns["round"]) else (b, a)


def problem(settings: Mapping[str, Any]) -> str:
    """Return the problem in words: task, model, partition."""
    beta = settings.get("partition.beta")
    parts = [settings.get(name) for name in PANEL[:3]]
    words = [str(p) for p in parts if p is not None]
    if beta is not None and settings.get("partition.name") == "dirichlet":
        words[-1] += f" beta={beta}"
    if settings.get("devices.name") is not None:  # only in runs on a virtual clock
        words.append(f"devices {settings['devices.name']}")
    if settings.get(DATA) is not None:  # only where runs of one configuration have several
        words.append(f"data {settings[DATA]}")
    return ", ".join(words)


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (method, panel) of each configuration.

    The method part lists the settings that differ between configurations of the same problem; the panel part lists
    those that differ between problems.
    """
    shown = [name for name in PANEL if _differs(name, settings)]
    labels = []
    for mine in settings:
        rivals = [s for s in settings if problem(s) == problem(mine)]
        names = sorted({name for s in rivals for name in s})
        differing = [name for name in names if name != "method.name" and _differs(name, rivals)]
        extra = [
            f"{_short(name, differing)}={mine[name]}"
            for name in differing
            if name not in PANEL and mine.get(name) is not None and _matters(name, mine, rivals)
        ]
        panel = [
            PANEL_NAMED.get(name, "") + str(mine[name])
            for name in shown
            if mine.get(name) is not None and _matters(name, mine, settings)
        ]
        labels.append((" ".join([str(mine["method.name"]), *extra]), ", ".join(panel)))
    return labels


def _differs(name: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    return len({str(s.get(name)) for s in settings}) > 1


def _matters(name: str, mine: Mapping[str, Any], settings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether `mine` differs in `name` from another configuration with the same choice for the setting's group.

    ``method.alpha`` distinguishes only runs of FedCross; the method's name already distinguishes FedCross from FedAvg.
    """
    choice = f"{name.split('.')[0]}.name"
    if name == choice or choice not in mine:
        return True
    return _differs(name, [s for s in settings if s.get(choice) == mine[choice]])


def _short(name: str, names: Sequence[str]) -> str:
    """Return the last part of a method's setting, or the whole name if another of `names` ends the same.

    Settings of other groups keep their group: ``devices.shares`` is not the method's.
    """
    last = name.split(".")[-1]
    if last == "name":
        return name.split(".")[0]
    if not name.startswith("method."):
        return name
    return last if sum(n.split(".")[-1] == last for n in names) == 1 else name
