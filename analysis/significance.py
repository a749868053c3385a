"""Paired comparison of two configurations over the seeds they share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedcross.analysis.groups import Group

WILCOXON_FROM = 6
"""With n pairs the smallest two-sided p of the exact Wilcoxon test is 2 / 2^n: below .05 from six pairs on."""

T_FROM = 3
"""Two pairs leave one degree of freedom: their p says how equal two differences are by chance."""
ALL_PAIRS = 5
"""Up to so many configurations of a problem are all compared with each other."""


@dataclass(frozen=True)
class Comparison:
    """`first` minus `second` in smoothed accuracy, paired by seed.

    Attributes
    ----------
    difference : float
        Mean over the pairs, in [-1, 1].
    interval : tuple of float
        95 % confidence interval of the mean difference (Student's t); nan below two pairs.
    n : int
        Number of pairs: seeds that both configurations have.
    t, holm : float
        Two-sided p of the paired t-test, and the same after Holm's correction within the problem; nan where the test
        is not defined (all differences equal) or says nothing (fewer than three pairs).
    wilcoxon : float
        Two-sided p of Wilcoxon's signed-rank test; nan below six pairs.
    """

    problem: str
    first: str
    second: str
    difference: float
    interval: tuple[float, float]
    n: int
    t: float
    holm: float
    wilcoxon: float


def paired(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the p of the paired t-test and of Wilcoxon's test of two samples of equal length (nan: not defined)."""
    from scipy import stats

    d = np.subtract(first, second)
    t = wilcoxon = math.nan
    if d.size >= T_FROM and np.ptp(d) > 1e-12:
        t = float(stats.ttest_1samp(d, 0.0).pvalue)
    if np.count_nonzero(d) >= WILCOXON_FROM:
        wilcoxon = float(stats.wilcoxon(d).pvalue)
    return t, wilcoxon


def interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of `first` minus `second`, paired, by Student's t; nan below two pairs."""
    from scipy import stats

    d = np.subtract(first, second)
    if d.size < 2:
        return math.nan, math.nan
    half = float(stats.t.ppf(0.975, d.size - 1) * d.std(ddof=1) / math.sqrt(d.size))
    return float(d.mean()) - half, float(d.mean()) + half


def holm(p: Sequence[float]) -> list[float]:
    """Return Holm's step-down adjusted p-values; nan stays nan and is not counted."""
    order = sorted((i for i in range(len(p)) if not math.isnan(p[i])), key=lambda i: p[i])
    adjusted = [math.nan] * len(p)
    highest = 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p[i]))
        adjusted[i] = highest
    return adjusted


def compare(groups: Sequence[Group]) -> list[Comparison]:
    """Compare within each problem: every pair of up to `ALL_PAIRS` configurations, otherwise each with one.

    That one is the first whose clients train alike (all settings of ``train`` are equal), or else the first of all; the
    first is FedAvg if it is among them. Pairs that share fewer than two seeds are left out.
    """
    found: list[Comparison] = []
    for problem in dict.fromkeys(group.problem for group in groups):
        members = [group for group in groups if group.problem == problem]
        if len(members) <= ALL_PAIRS:
            rows = [_pair(b, a) for i, a in enumerate(members) for b in members[i + 1 :]]
        else:
            rows = [_pair(b, _reference(b, members)) for b in members[1:]]
        rows = [row for row in rows if row.n > 1]
        corrected = holm([row.t for row in rows])
        found += [Comparison(**{**vars(row), "holm": value}) for row, value in zip(rows, corrected)]
    return found


def _reference(group: Group, members: Sequence[Group]) -> Group:
    """Return with which of `members`, the first or a later one, `group` is compared."""
    found = next(one for one in members if _training(one) == _training(group))
    return members[0] if found is group else found


def _training(group: Group) -> dict[str, str]:
    return {name: str(value) for name, value in group.settings.items() if name.startswith("train.")}


def _pair(first: Group, second: Group) -> Comparison:
    a = {run.seed: run.smoothed.mean for run in first.runs}
    b = {run.seed: run.smoothed.mean for run in second.runs}
    seeds = [seed for seed in a if seed in b]
    x, y = [a[s] for s in seeds], [b[s] for s in seeds]
    t, wilcoxon = paired(x, y) if len(seeds) > 1 else (math.nan, math.nan)
    difference = float(np.mean(np.subtract(x, y))) if seeds else math.nan
    names = (first.problem, first.method, second.method)
    return Comparison(*names, difference, interval(x, y), len(seeds), t, math.nan, wilcoxon)
