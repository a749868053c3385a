"""A table of text, written as Markdown and LaTeX; numbers as short text: percent with a spread, bytes, durations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

import fedcross

DASH = "–"
OPTIONAL = ("published rounds", "p (Wilcoxon)", "virtual time")
NAMES = {name.lower(): name for name in dir(fedcross) if name[0].isupper()} | {"moon": "MOON", "scaffold": "SCAFFOLD"}
"""Published name of each method."""


def percent(values: Sequence[float]) -> str:
    """Return mean and sample standard deviation of shares in [0, 1] as percent: ``54.78 ± 0.56``."""
    known = pd.Series(values, dtype=float).dropna()
    if known.empty:
        return DASH
    return f"{100 * known.mean():.2f}" + (f" ± {100 * known.std():.2f}" if len(known) > 1 else "")


def size(counts: float | pd.Series[float]) -> str:
    """Return a number of bytes, or the mean of several, with a decimal unit: ``12.3 MB``."""
    if math.isnan(count := float(np.mean(counts))):
        return DASH
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(times: float | pd.Series[float]) -> str:
    """Return seconds, or the mean of several, as a short text: ``8.1 s``, ``3m 20s``, ``2h 05m``."""
    if math.isnan(seconds := float(np.mean(times))):
        return DASH
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60}h {minutes % 60:02d}m"


def published_name(label: str) -> str:
    """Return a label with the published name of its method: ``fedcross alpha=0.9`` becomes ``FedCross alpha=0.9``."""
    name, _, settings = label.partition(" ")
    return f"{NAMES.get(name.replace('_', ''), name)} {settings}".strip()


@dataclass(frozen=True)
class Table:
    """A table with a title and a note; `best` names the columns whose highest number is bold in LaTeX."""

    title: str
    frame: pd.DataFrame
    note: str = ""
    best: Sequence[str] = ()

    def compact(self) -> Table:
        """Return the table with a shared problem in its title, and without optional columns of dashes."""
        frame, title = self.frame, self.title
        if "problem" in frame and frame["problem"].nunique() == 1:
            title = f"{title}: {frame['problem'].iloc[0]}"
            frame = frame.drop(columns="problem")
        empty = [name for name in OPTIONAL if name in frame and (frame[name] == DASH).all()]
        return replace(self, title=title, frame=frame.drop(columns=empty))

    def markdown(self) -> str:
        """Return the table as GitHub Markdown; columns are padded for reading as text."""
        cells = self.frame.T.reset_index().T.astype(str).map(lambda text: text.replace("|", "\\|"))
        widths = [max(3, int(cells[column].str.len().max())) for column in cells]
        rows = [" | ".join(map(str.ljust, row, widths)) for row in cells.itertuples(index=False)]
        lines = [f"| {rows[0]} |", "|" + "|".join("-" * (w + 2) for w in widths) + "|", *(f"| {r} |" for r in rows[1:])]
        return "\n\n".join([f"## {self.title}", "\n".join(lines), *([self.note] if self.note else [])]) + "\n"

    def latex(self) -> str:
        """Return the table as a LaTeX float: booktabs rules, a label, numbers aligned right, the best in bold."""
        frame = self.frame.reset_index(drop=True)
        words = [name in ("problem", "method", "first", "second") for name in frame]
        if "method" in frame:
            frame["method"] = frame["method"].map(published_name)
        style = frame.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis=1)
        for name in self.best:
            numbers = pd.to_numeric(frame[name].str.split().str[0], errors="coerce")
            groups = frame["problem"] if "problem" in frame else pd.Series("", frame.index)
            top = numbers == numbers.groupby(groups).transform("max")
            style = style.apply(lambda _, top=top: ["textbf:--rwrap;" if t else "" for t in top], subset=[name])
        text: str = style.to_latex(
            hrules=True,
            position="t",
            position_float="centering",
            column_format="".join("l" if word else "r" for word in words),
            caption=self.title.replace("_", r"\_").replace("%", r"\%"),
            label="tab:" + "".join(c if c.isalnum() else "-" for c in self.title.lower()),
        )
        return text
