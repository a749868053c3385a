"""Writes a table and a plot of newcomers' local epochs, from the ``onboard.json`` of ``fedcross onboard``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedcross.analysis.curves import COLOURS, DASHES


def write_report(path: Path) -> str:
    """Write ``onboard.md`` and ``onboard.png`` beside the JSON file at `path`; return the table's text."""
    content = json.loads(path.read_text(encoding="utf-8"))
    groups: dict[str, list[dict[str, Any]]] = {}
    for newcomer in content["newcomers"]:
        groups.setdefault(newcomer["label"], []).append(newcomer)
    text = table(groups, content["tolerance"], content["targets"])
    path.with_suffix(".md").write_text(text, encoding="utf-8")
    draw(groups, path.with_suffix(".png"))
    return text


def table(groups: dict[str, list[dict[str, Any]]], tolerance: float, targets: list[float]) -> str:
    """Return a Markdown table: one row per method, means over its runs."""
    wanted = [str(target) for target in targets]
    heads = ["method", "runs", "before training, %", f"epochs to best - {100 * tolerance:g} %", "best, %"]
    heads += [f"epochs to {100 * float(target):g} %" for target in wanted]
    rows = []
    for label, members in groups.items():
        start = np.mean([m["accuracy"][0] for m in members])
        best = np.mean([max(m["accuracy"]) for m in members])
        cells = [label, str(len(members)), f"{100 * start:.2f}", _mean([m["converged"] for m in members])]
        rows.append([*cells, f"{100 * best:.2f}", *(_mean([m["reached"][t] for m in members]) for t in wanted)])
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _mean(epochs: list[int | None]) -> str:
    """Return the mean of `epochs`; if some newcomers never reached the target, also how many did."""
    known = [epoch for epoch in epochs if epoch is not None]
    if len(known) == len(epochs):
        return f"{np.mean(known):.1f}"
    return f"{np.mean(known):.1f} ({len(known)} of {len(epochs)})" if known else "never"


def draw(groups: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw the newcomers' accuracy over their local epochs, mean over runs, range as a band."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.6, 4.4), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for i, (label, members) in enumerate(groups.items()):
        curves = 100 * np.array([m["accuracy"] for m in members])
        epochs = np.arange(curves.shape[1])
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(epochs, curves.mean(0), color=colour, linestyle=DASHES[i % len(DASHES)], marker="o", label=label)
        if len(members) > 1:
            axes.fill_between(epochs, curves.min(0), curves.max(0), color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel("local epochs of the newcomer")
    axes.set_ylabel("accuracy on its own test data, %")
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path)
