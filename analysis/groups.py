"""Runs of one configuration under several seeds as one group, with a label made of what differs between the groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedcross.analysis.runs import Curve, Run

IGNORED = (
    "seed", "logger", "hydra", "experiment", "output", "resume", "checkpoint", "snapshots", "federation", "data_root",
    "task.root", "task.download",
)  # fmt: skip
"""Settings, alone or as a group, that do not change what is learned: not part of a configuration's identity."""

WHERE = ("engine", "device")
"""Where a run ran. By design the result does not depend on it, so seeds from several machines are one group, unless
the same seed ran in two places: then the places are what is compared."""

PANEL = ("task.name", "model.name", "partition.name", "partition.beta")
"""Settings that say which problem is solved. Runs of different problems are never drawn in one plot."""


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
    """Runs that differ in their seed only.

    Attributes
    ----------
    method : str
        Method, and its settings where groups differ in them: ``fedcross alpha=0.99``.
    panel : str
        The problem where groups differ in it: ``cifar10, dirichlet beta=0.5``; empty if there is one problem.
    problem : str
        The whole problem, always: ``cifar10, cnn, dirichlet beta=0.5``.
    runs : list of Run
        Ordered by seed.
    """

    method: str
    panel: str
    problem: str
    runs: list[Run]

    @property
    def label(self) -> str:
        """What tells this group from the others."""
        return f"{self.method} ({self.panel})" if self.panel else self.method

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the first run; the others differ in the seed only."""
        return self.runs[0].settings

    @property
    def finished(self) -> bool:
        """Whether all runs reached their last round."""
        return all(run.finished for run in self.runs)

    def over_seeds(self, value: Callable[[Run], float]) -> Spread:
        """Return mean and spread of a number per run."""
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


def identity(run: Run, ignored: Sequence[str] = IGNORED + WHERE) -> tuple[tuple[str, Any], ...]:
    """Return the configuration without the seed and without what does not change the result, hashable."""
    kept = ((k, v) for k, v in run.settings.items() if counts(k, ignored))
    return tuple(sorted((k, str(v) if isinstance(v, (tuple, dict)) else v) for k, v in kept))


def _compares_places(runs: Sequence[Run]) -> bool:
    """Whether one configuration and seed ran in two places."""
    places: dict[object, set[object]] = {}
    for run in runs:
        places.setdefault((identity(run), run.seed), set()).add(identity(run, IGNORED))
    return any(len(found) > 1 for found in places.values())


def group_runs(runs: Sequence[Run]) -> tuple[list[Group], list[str]]:
    """Group `runs` by configuration minus seed.

    Returns
    -------
    groups : list of Group
        Ordered by problem; FedAvg first, then by name.
    notes : list of str
        A sentence for each run left out because its configuration and seed are there already.
    """
    notes: list[str] = []
    ignored = IGNORED if _compares_places(runs) else IGNORED + WHERE
    cells: dict[tuple[tuple[str, Any], ...], dict[int | None, Run]] = {}
    for run in runs:
        seeds = cells.setdefault(identity(run, ignored), {})
        kept = run
        if run.seed in seeds:
            dropped, kept = _by_length(seeds[run.seed], run)
            notes.append(f"left out {dropped.path}: same configuration and seed as {kept.path}")
        seeds[run.seed] = kept
    members = [[seeds[s] for s in sorted(seeds, key=lambda s: (s is None, s or 0))] for seeds in cells.values()]
    labels = _labels([{k: v for k, v in m[0].settings.items() if counts(k, ignored)} for m in members])
    groups = [Group(method, panel, problem(m[0].settings), m) for m, (method, panel) in zip(members, labels)]
    return sorted(groups, key=lambda g: (g.problem, g.settings["method.name"] != "fedavg", g.method)), notes


def _by_length(a: Run, b: Run) -> tuple[Run, Run]:
    """Return the run with fewer rounds (of equal ones the earlier path), then the other."""
    return (a, b) if len(a.columns["round"]) <= len(b.columns["round"]) else (b, a)


def problem(settings: Mapping[str, Any]) -> str:
    """Return the problem in words: task, model, partition."""
    beta = settings.get("partition.beta")
    parts = [settings.get(name) for name in PANEL[:3]]
    words = [str(p) for p in parts if p is not None]
    if beta is not None and settings.get("partition.name") == "dirichlet":
        words[-1] += f" beta={beta}"
    return ", ".join(words)


def _labels(settings: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Return (method, panel) of each configuration.

    The method part names what differs among the configurations of the same problem, the panel part what differs
    between the problems.
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
            f"beta={mine[name]}" if name == "partition.beta" else str(mine[name])
            for name in shown
            if mine.get(name) is not None and _matters(name, mine, settings)
        ]
        labels.append((" ".join([str(mine["method.name"]), *extra]), ", ".join(panel)))
    return labels


def _differs(name: str, settings: Sequence[Mapping[str, Any]]) -> bool:
    return len({str(s.get(name)) for s in settings}) > 1


def _matters(name: str, mine: Mapping[str, Any], settings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether `name` tells `mine` from another configuration that made the same choice for the setting's group.

    ``method.alpha`` only tells FedCross runs apart, not FedCross from FedAvg: the method's name does that already.
    """
    choice = f"{name.split('.')[0]}.name"
    if name == choice or choice not in mine:
        return True
    return _differs(name, [s for s in settings if s.get(choice) == mine[choice]])


def _short(name: str, names: Sequence[str]) -> str:
    """Return the last part of a dotted name, or all of it if another of `names` ends the same."""
    last = name.split(".")[-1]
    if last == "name":
        return name.split(".")[0]
    return last if sum(n.split(".")[-1] == last for n in names) == 1 else name
