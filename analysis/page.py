"""One self-contained HTML page: sortable tables, interactive curves, heat maps and the provenance of every run.

The file contains everything, also plotly's JavaScript; a content security policy forbids every request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

from fedcross.analysis.ablation import Grid
from fedcross.analysis.axes import AXES
from fedcross.analysis.curves import COLOURS, DASHES, SMOOTH_FROM, styles
from fedcross.analysis.groups import Group
from fedcross.analysis.runs import Run
from fedcross.analysis.tables import Table, compact
from fedcross.core.strict_json import dumps
from fedcross.tasks.scoring import WINDOW

if TYPE_CHECKING:
    from fedcross.analysis.summary import Report

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
PLOTLY_DASHES = ("solid", "dash", "dot", "dashdot")
DARK = dict(zip(COLOURS, ("#4aa3df", "#ff8a3d", "#2cc99a", "#e39bc3", "#f0b429", "#9bd5f7", "#ffffff"), strict=True))
"""For each curve colour, the lighter one for a dark page."""
WORDS = ("problem", "method", "first", "second")
"""Columns that may wrap on a narrow screen."""
LONG = 40
"""Cells with more characters may wrap anywhere."""


def page(report: Report, x: str = "rounds") -> str:
    """Return the page for `report`; it initially shows axis `x` (a key of ``AXES``)."""
    from plotly.offline import get_plotlyjs

    files = resources.files("fedcross.analysis")
    style, script = (files.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    body = [
        "<header><h1>fedcross report</h1><button id=theme type=button>dark / light</button></header>",
        *(_table(table) for table in report.tables[:1]),
        _curves(report, x),
        *(_table(table) for table in report.tables[1:]),
        *_heat_maps(report.grids),
        _provenance(report.groups),
        _notes(report.notes),
    ]
    values = dumps(_data(report, x), separators=(",", ":")).replace("<", "\\u003c")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<link rel="icon" href="data:,"><title>fedcross report</title>',
            f"<style>{style}</style></head>",
            "<body>",
            *body,
            f'<script type="application/json" id="data">{values}</script>',
            f"<script>{get_plotlyjs()}</script>",
            f"<script>{script}</script>",
            "</body></html>",
        ]
    )


def _data(report: Report, x: str) -> dict[str, Any]:
    style = styles(report.groups)
    dash = dict(zip(map(str, DASHES), PLOTLY_DASHES))
    return {
        "axis": x,
        "axes": AXES,
        "window": WINDOW,
        "smoothFrom": SMOOTH_FROM,
        "problems": list(dict.fromkeys(group.problem for group in report.groups)),
        "curves": [_curve(g, style[g.method][0], dash[str(style[g.method][1])]) for g in report.groups],
        "grids": [_grid(grid) for grid in report.grids],
    }


def _curve(group: Group, colour: str, dash: str) -> dict[str, Any]:
    per_axis = {name: group.curve(name) for name in AXES}
    _, mean, std = per_axis["rounds"]
    return {
        "name": group.method if group.finished else f"{group.method} (unfinished)",
        "problem": group.problem,
        "colour": colour,
        "dark": DARK[colour],
        "dash": dash,
        "seeds": len(group.runs),
        "x": {name: _numbers(curve[0]) for name, curve in per_axis.items()},
        "mean": _numbers(100 * mean),
        "std": _numbers(100 * std),
    }


def _numbers(values: Any) -> list[float | None]:
    return [None if math.isnan(v) else float(f"{v:.6g}") for v in map(float, values)]


def _grid(grid: Grid) -> dict[str, Any]:
    values = [_numbers(100 * row) for row in grid.values]
    return {
        "alphas": grid.alphas,
        "selections": grid.selections,
        "values": values,
        "text": [["" if v is None else f"{v:.2f}" for v in row] for row in values],
    }


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col"><button type="button">{escape(name)}</button></th>' for name in table.header)
    rows = "".join("<tr>" + "".join(map(_cell, table.header, row)) + "</tr>" for row in table.rows)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<section><h2>{escape(table.title)}</h2><div class="scroll" tabindex="0"><table class="sortable">'
        f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{note}</section>"
    )


def _cell(name: str, text: str) -> str:
    kind = "wide" if len(text) > LONG else "word" if name in WORDS else ""
    return (f'<td class="{kind}">' if kind else "<td>") + escape(text) + "</td>"


def _curves(report: Report, x: str) -> str:
    present = [name for name in AXES if name in ("rounds", x) or _known(report.groups, name)]
    buttons = "".join(
        f'<button type="button" data-axis="{name}" aria-pressed="{str(name == x).lower()}">{name}</button>'
        for name in present
    )
    problems = dict.fromkeys(group.problem for group in report.groups)
    plots = "".join(
        f'<h3>{escape(name)}</h3><div class="legend" id="legend-{i}"></div><div class="plot" id="plot-{i}"></div>'
        for i, name in enumerate(problems)
    )
    return (
        f'<section><h2>Curves</h2><div class="bar"><span>over</span>{buttons}'
        f'<button type="button" id="smooth">mean of {WINDOW} evaluations</button></div>{plots}'
        '<p class="note">Mean over seeds; the band is one sample standard deviation to each side. '
        "An epoch is one local pass of a sampled client over its data.</p></section>"
    )


def _known(groups: Sequence[Group], axis: str) -> bool:
    """Whether the runs have the data for `axis`."""
    if axis == "exchanges":
        return any("exchanges" in run.columns for group in groups for run in group.runs)
    return any(not math.isnan(run.axis(axis)[-1]) for group in groups for run in group.runs)


def _heat_maps(found: Sequence[Grid]) -> list[str]:
    return [
        f'<section><h2>Heat map: {escape(grid.problem)}</h2><div class="heat" id="heat-{i}"></div>'
        '<p class="note">FedCross, smoothed test accuracy in percent, mean over seeds.</p></section>'
        for i, grid in enumerate(found)
    ]


def _provenance(groups: Sequence[Group]) -> str:
    rows = [(group.problem, group.method, *_origin(run)) for group in groups for run in group.runs]
    header = ("problem", "method", "seed", "rounds", "commit", "engine", "machine", "versions", "folder")
    settings = "".join(
        f"<details><summary>{escape(group.problem)}: {escape(group.method)}</summary><pre>"
        + escape("\n".join(f"{name}: {value}" for name, value in group.settings.items() if name != "seed"))
        + "</pre></details>"
        for group in groups
    )
    return _table(compact(Table("Provenance", header, rows))) + f"<section><h3>Configurations</h3>{settings}</section>"


def _origin(run: Run) -> tuple[str, ...]:
    """Return seed, rounds, commit, engine, machine, versions and folder of a run, as text."""
    of = run.result.get
    engine = of("engine", run.settings.get("engine.name"))
    machine = [str(value) for value in (of("device"), _flat(of("machine"))) if value]
    return (
        str(run.seed),
        str(int(run.columns["round"][-1])) + ("" if run.finished else f" ({run.note})"),
        _commit(of("commit")),
        _flat(engine) or "–",
        ", ".join(machine) or "–",
        _flat(of("versions")) or "–",
        str(run.path),
    )


def _commit(value: object) -> str:
    """Return twelve digits of a commit, and whether the checkout had changes."""
    text = str(value or "–")
    return text[:12] + ("-dirty" if text.endswith("-dirty") and len(text) > 12 else "")


def _flat(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {item}" for name, item in value.items())
    return "" if value is None else str(value)


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"<section><h2>Notes</h2><ul>{items}</ul></section>" if notes else ""
