"""The files of a run as typed values: settings, learning curves, smoothed accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcross.tasks.scoring import WINDOW, Smoothed, smoothed

Curve = NDArray[np.float64]
#: Start of the names of the columns with the accuracy of each size of the model; the size follows: ``0.66``, ``0.4@2``.
WIDTHS = "width_accuracy."


@dataclass(frozen=True)
class Run:
    """One run folder.

    Attributes
    ----------
    path : Path
        The folder.
    settings : mapping of str to value
        The configuration with dotted names: ``method.name``, ``train.lr``, ...
    columns : mapping of str to array of float, shape (rounds,)
        The fields of ``metrics.jsonl`` by name; nan where a line has null or lacks the field. Accuracies in [0, 1].
    result : mapping
        ``result.json``; empty if the run did not finish.
    note : str
        Empty for a complete run, otherwise a text on what is missing.
    """

    path: Path
    settings: Mapping[str, Any]
    columns: Mapping[str, Curve]
    result: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def finished(self) -> bool:
        """Whether the run reached its last round."""
        return not self.note

    @property
    def seed(self) -> int | None:
        """The seed of the configuration."""
        seed = self.settings.get("seed")
        return None if seed is None else int(seed)

    def column(self, name: str) -> Curve:
        """Return a field of the metrics, shape (rounds,); nan everywhere if no line has it."""
        found = self.columns.get(name)
        return np.full(len(self.columns["round"]), np.nan) if found is None else found

    @cached_property
    def evaluated(self) -> NDArray[np.bool_]:
        """True in rounds with a measured test accuracy, shape (rounds,)."""
        return ~np.isnan(self.column("test_accuracy"))

    @cached_property
    def accuracy(self) -> Curve:
        """Test accuracies of the evaluated rounds, shape (evaluations,), in [0, 1]."""
        return self.column("test_accuracy")[self.evaluated]

    @property
    def cadence(self) -> int:
        """The most frequent number of rounds between two evaluations; 0 if there were fewer than two."""
        rounds = self.columns["round"][self.evaluated]
        apart, times = np.unique(np.diff(rounds).astype(np.int64), return_counts=True)
        return int(apart[times.argmax()]) if apart.size else 0

    @property
    def final(self) -> float:
        """Test accuracy of the last evaluation; nan if there was none."""
        return float(self.accuracy[-1]) if self.accuracy.size else math.nan

    @property
    def best(self) -> float:
        """Highest test accuracy; nan if nothing was evaluated."""
        return float(self.accuracy.max()) if self.accuracy.size else math.nan

    @cached_property
    def smoothed(self) -> Smoothed:
        """The papers' smoothed accuracy."""
        return smoothed(self.accuracy)

    @property
    def sizes(self) -> list[str]:
        """Names of the sizes of the model whose accuracy was measured, the widest first."""
        found = [name.removeprefix(WIDTHS) for name in self.columns if name.startswith(WIDTHS)]
        return sorted(found, key=lambda size: tuple(-float(part) for part in f"{size}@0".split("@")[:2]))

    def of_size(self, size: str) -> float:
        """Return the last test accuracy of the model of a size; nan if it was not measured."""
        known = self.column(f"{WIDTHS}{size}")
        known = known[~np.isnan(known)]
        return float(known[-1]) if known.size else math.nan

    @property
    def last_ten(self) -> float:
        """Mean test accuracy of the last ten evaluations, or of all if there are fewer; nan if there was none."""
        return float(self.accuracy[-WINDOW:].mean()) if self.accuracy.size else math.nan

    @property
    def bytes_total(self) -> float:
        """Bytes moved in both directions."""
        return float(self.axis("bytes")[-1]) * 1e6

    @property
    def seconds_total(self) -> float:
        """Seconds of all rounds."""
        return float(self.axis("seconds")[-1])

    def axis(self, x: str) -> Curve:
        """Return the position of every round on axis `x` (a key of ``axes.AXES``), shape (rounds,).

        Bytes are in MB (1e6). An epoch is one local pass over the data of a sampled client; a round's later exchanges
        have ``method.host_epochs`` each, else ``train.epochs``. A line without ``exchanges`` counts as one exchange:
        one model down and one up per client. Virtual seconds are nan in runs without a virtual clock.
        """
        if x == "rounds":
            return self.columns["round"]
        if x == "epochs":
            return self._epochs()
        if x == "bytes":
            return np.cumsum(np.nan_to_num(self.column("bytes_down")) + np.nan_to_num(self.column("bytes_up"))) / 1e6
        if x == "seconds":
            return np.cumsum(np.nan_to_num(self.column("seconds")))
        if x == "virtual":
            return np.cumsum(self.column("virtual_seconds"))
        if x == "visits":
            return np.cumsum(np.nan_to_num(self.column("clients")))
        return np.cumsum(np.nan_to_num(self.column("exchanges"), nan=1.0))

    def _epochs(self) -> Curve:
        first = float(self.settings.get("train.epochs") or math.nan)
        further = float(self.settings.get("method.host_epochs") or first)
        exchanges = np.nan_to_num(self.column("exchanges"), nan=1.0)
        return np.cumsum(np.where(exchanges > 0, first + further * (exchanges - 1), 0.0))

    def reach(self, target: float, x: str) -> float:
        """Return where on axis `x` the test accuracy first is at least `target` (in [0, 1]); nan if never."""
        hits = np.flatnonzero(np.nan_to_num(self.column("test_accuracy"), nan=-1.0) >= target)
        return float(self.axis(x)[hits[0]]) if hits.size else math.nan

    def at(self, number: int) -> float:
        """Return the test accuracy of round `number`, in [0, 1]; nan if it was not evaluated then."""
        rows = np.flatnonzero(self.columns["round"] == number)
        return float(self.column("test_accuracy")[rows[-1]]) if rows.size else math.nan

    def until(self, last: int) -> Run:
        """Return this run as if it had been planned for `last` rounds, for comparisons at equal rounds.

        A run that is not longer stays unchanged. For a method that uses the number of planned rounds (FedProc), the
        first rounds of a long run differ from those of a short one.
        """
        planned = self.settings.get("rounds")
        if self.columns["round"][-1] <= last and not (isinstance(planned, int) and planned > last):
            return self
        kept = self.columns["round"] <= last
        columns = {name: column[kept] for name, column in self.columns.items()}
        whole = bool(kept.any()) and columns["round"][-1] == last
        return replace(
            self, columns=columns, settings={**self.settings, "rounds": last}, note="" if whole else self.note
        )

    def every(self, interval: int) -> Run:
        """Return this run as if it had been evaluated every `interval` rounds, for comparisons at equal measures.

        The smoothed accuracy is a mean over evaluations, so over more rounds where these are rarer.

        Raises
        ------
        ValueError
            If it was not evaluated in all of those rounds.
        """
        rare = self.columns["round"] % interval != 0
        if not self.evaluated[~rare].all():
            raise ValueError(f"not evaluated every {interval} rounds")
        columns = {
            name: np.where(rare, np.nan, column) if name.startswith(("test_", WIDTHS)) else column
            for name, column in self.columns.items()
        }
        return replace(self, columns=columns, settings={**self.settings, "evaluate_every": interval})
