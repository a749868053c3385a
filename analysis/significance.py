"""Paired comparison of configurations over the seeds they share."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

WILCOXON_FROM = 6
"""With n pairs the smallest two-sided p of the exact Wilcoxon test is 2 / 2^n: below .05 from six pairs on."""
T_FROM = 3
"""Fewer pairs leave the t-test without a meaning."""
ALL_PAIRS = 5
"""Up to so many configurations of a problem are all compared with each other."""


def paired(first: pd.Series[float], second: pd.Series[float]) -> dict[str, float]:
    """Compare two samples, paired by index.

    Returns ``difference`` (mean of first - second), ``low`` and ``high`` (95 % interval, Student's t), ``n``, and the
    two-sided p of the paired ``t``-test and of ``wilcoxon``'s test; NaN where a test is not defined.
    """
    d = (first - second).dropna().to_numpy(float)
    found = dict.fromkeys(("difference", "low", "high", "t", "wilcoxon"), math.nan) | {"n": d.size}
    if d.size:
        found["difference"] = float(d.mean())
    if d.size > 1:
        test = stats.ttest_1samp(d, 0.0) if np.ptp(d) > 1e-12 else None
        interval = test.confidence_interval(0.95) if test else (d.mean(), d.mean())
        found["low"], found["high"] = (float(value) for value in interval)
        found["t"] = float(test.pvalue) if test and d.size >= T_FROM else math.nan
    if np.count_nonzero(d) >= WILCOXON_FROM:
        found["wilcoxon"] = float(stats.wilcoxon(d).pvalue)
    return found


def holm(p: pd.Series[float]) -> pd.Series[float]:
    """Return Holm's step-down adjusted p-values; NaN stays NaN and is not counted."""
    known = p.dropna().sort_values(kind="stable")
    return (known * np.arange(len(known), 0, -1)).cummax().clip(upper=1.0).reindex(p.index)


def compare(frame: pd.DataFrame) -> pd.DataFrame:
    """Compare the configurations of each problem in smoothed accuracy.

    Every pair of up to :data:`ALL_PAIRS` configurations; of more, each with the first whose clients train alike. Pairs
    that share fewer than two seeds are left out. `frame` is that of :func:`fedcross.analysis.runs.runs_frame`.

    Columns: ``problem``, ``first``, ``second``, those of :func:`paired`, and ``holm`` within the problem.
    """
    rows: list[dict[str, Any]] = []
    for problem, members in frame.groupby("problem", sort=False):
        groups = [group for _, group in members.groupby("group", sort=False)]
        if len(groups) <= ALL_PAIRS:
            pairs = [(second, first) for first, second in combinations(groups, 2)]
        else:
            alike = [next(one for one in groups if _training(one) == _training(group)) for group in groups]
            pairs = [(group, groups[0] if one is group else one) for group, one in zip(groups[1:], alike[1:])]
        rows += [
            {"problem": problem, "first": first["method"].iloc[0], "second": second["method"].iloc[0]}
            | paired(*(one.set_index("seed")["smoothed"] for one in (first, second)))
            for first, second in pairs
        ]
    found = pd.DataFrame([row for row in rows if row["n"] > 1])
    return found.assign(holm=found.groupby("problem", sort=False)["t"].transform(holm)) if len(found) else found


def _training(group: pd.DataFrame) -> dict[str, str]:
    settings = group["run"].iloc[0].settings
    return {name: str(value) for name, value in settings.items() if name.startswith("train.") and value}
