"""Numbers as short text: percent with a spread, bytes, durations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

DASH = "–"


def percent(values: Sequence[float], digits: int = 2) -> str:
    """Return mean and sample standard deviation of shares in [0, 1] as percent: ``54.78 ± 0.56``."""
    known = pd.Series(values, dtype=float).dropna()
    if known.empty:
        return DASH
    spread = f" ± {100 * known.std():.{digits}f}" if len(known) > 1 else ""
    return f"{100 * known.mean():.{digits}f}{spread}"


def size(count: float) -> str:
    """Return a number of bytes with a decimal unit: ``12.3 MB``."""
    if math.isnan(count):
        return DASH
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Return seconds as a short text: ``8.1 s``, ``3m 20s``, ``2h 05m``."""
    if math.isnan(seconds):
        return DASH
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"
