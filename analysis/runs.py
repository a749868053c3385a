"""One run as settings, a frame of its rounds, and the numbers of the accuracy table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedcross.tasks.scoring import Smoothed, smoothed

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

    def axis(self, x: str) -> pd.Series[float]:
        """Return the position of every round on the axis `x` (a key of :data:`AXES`); bytes in MB."""
        if x == "rounds":
            return self.curve.index.to_series().astype(float)
        name = "virtual_seconds" if x == "virtual" else x
        found = self.curve.get(name, pd.Series(np.nan, self.curve.index))
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
        """Return this run as if it had been evaluated every `interval` rounds.

        Raises
        ------
        BadRunError
            If one of those rounds was not evaluated.
        """
        kept = self.curve.index % interval == 0
        due = range(interval, self.rounds + 1, interval)
        if not set(due) <= set(self.accuracy.index):
            raise BadRunError(f"not evaluated every {interval} rounds")
        measured = [name for name in self.curve if name in ("accuracy", "loss") or str(name).startswith(WIDTH)]
        curve = self.curve.copy()
        curve.loc[~kept, measured] = np.nan
        return replace(self, curve=curve, settings={**self.settings, "evaluate_every": interval})


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one with dotted names; lists become tuples."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = _hashable(value)
    return flat


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def active(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return `settings` without the groups that are switched off."""
    idle = [group for group, (name, off) in SWITCHES.items() if settings.get(name, off) == off]
    if settings.get("clock.name") != "virtual" and not settings.get("method.widths"):
        idle.append("devices")
    switches = {name for name, _ in SWITCHES.values()}
    return {name: value for name, value in settings.items() if name in switches or name.split(".")[0] not in idle}
