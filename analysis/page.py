"""One self-contained HTML page: sortable tables, interactive curves and heat maps by plotly, origin of every run.

The file contains everything, also plotly's JavaScript; a content security policy forbids every request.
"""

from __future__ import annotations

from datetime import date
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

import pandas as pd
import plotly.express as px
from plotly import graph_objects as go
from plotly.offline import get_plotlyjs

from fedcross.analysis.plots import COLOURS
from fedcross.analysis.runs import AXES, Run, curve
from fedcross.analysis.table import Table

if TYPE_CHECKING:
    from fedcross.analysis.report import Report

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


def page(report: Report, x: str = "rounds") -> str:
    """Return the page for `report`; it initially shows axis `x` (a key of ``AXES``)."""
    home, frame, title = resources.files("fedcross.analysis"), report.frame, escape(report.title)
    style, script = (home.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    first, *others = map(_table, report.tables)
    grids = [_html(_heat_map(problem, values)) for problem, values, _ in report.grids]
    body = [
        f'<h1>{title}</h1><p class="date">{date.today():%d %B %Y}</p><p>{escape(report.summary)}</p>',
        first,
        "<h2>Curves</h2>",
        *(_html(_curves(str(name), part, x)) for name, part in frame.groupby("problem", sort=False)),
        '<p class="note">Mean over seeds; the band is one sample standard deviation to each side.</p>',
        *others,
        *(["<h2>Heat map</h2>", *grids] if grids else []),
        _table(Table("Provenance", frame[["problem", "method"]].join(pd.DataFrame(map(_origin, frame["run"]))))),
        *(_settings(group) for _, group in frame.groupby("group", sort=False)),
    ]
    if report.notes:
        body += ["<h2>Notes</h2><ul>", *(f"<li>{escape(note)}</li>" for note in report.notes), "</ul>"]
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            f'<link rel="icon" href="data:,"><title>{title}</title><style>{style}</style>',
            f"<script>{get_plotlyjs()}</script></head><body>",
            *body,
            f"<script>{script}</script></body></html>",
        ]
    )


def _html(figure: Any) -> str:
    config = {"displaylogo": False, "responsive": True}
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config=config))


def _curves(problem: str, frame: pd.DataFrame, x: str) -> Any:
    """Return plotly's figure of one problem, with a menu for the axis."""
    figure = go.Figure(layout={"title": problem, "template": "plotly_white", "legend": {"orientation": "h", "y": -0.2}})
    present = [name for name in AXES if not any(run.axis(name).isna().all() for run in frame["run"])]
    places: dict[str, list[list[float]]] = {name: [] for name in present}
    for i, (_, group) in enumerate(frame.groupby("group", sort=False)):
        points = {name: curve(group, name) for name in present}
        mean, std = 100 * points["rounds"]["mean"], 100 * points["rounds"]["std"]
        name, colour = group["method"].iloc[0], COLOURS[i % len(COLOURS)]
        shared = {"x": points.get(x, points["rounds"])["x"], "mode": "lines", "legendgroup": name}
        band = {"showlegend": False, "hoverinfo": "skip", "line": {"width": 0, "color": colour}}
        figure.add_scatter(y=mean + std, **shared, **band)
        figure.add_scatter(y=mean - std, fill="tonexty", opacity=0.2, **shared, **band)
        figure.add_scatter(y=mean, name=name, line={"color": colour}, **shared)
        for axis in present:
            places[axis] += [points[axis]["x"].tolist()] * 3
    figure.update_yaxes(title="test accuracy, %")
    figure.update_xaxes(title=AXES[x])
    buttons = [
        {"label": name, "method": "update", "args": [{"x": places[name]}, {"xaxis.title.text": AXES[name]}]}
        for name in sorted(present, key=lambda name: name != x)
    ]
    figure.update_layout(updatemenus=[{"buttons": buttons, "x": 1, "xanchor": "right", "y": 1.15}])
    return figure


def _heat_map(problem: str, values: pd.DataFrame) -> Any:
    shown = (100 * values).rename(index="{:g}".format)
    figure = px.imshow(shown, text_auto=".2f", aspect="auto", color_continuous_scale="Cividis", title=problem)
    return figure.update_yaxes(type="category", title="alpha").update_xaxes(title="selection")


def _table(table: Table) -> str:
    with pd.option_context("display.max_colwidth", None):
        text = table.frame.astype(str).to_html(index=False, border=0)
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f'<h2>{escape(table.title)}</h2><div class="scroll" tabindex="0">{text}</div>{note}'


def _origin(run: Run) -> dict[str, str]:
    of = run.info.get
    commit = str(of("commit") or "–")
    return {
        "seed": str(run.seed),
        "rounds": str(run.rounds) + (f" ({run.note})" if run.note else ""),
        "commit": commit[:12] + ("-dirty" if commit.endswith("-dirty") else ""),
        "engine": str(of("engine", run.settings.get("engine.name", "–"))),
        "machine": ", ".join(str(value) for value in (of("device"), of("machine")) if value) or "–",
        "versions": ", ".join(f"{name} {value}" for name, value in (of("versions") or {}).items()) or "–",
        "folder": str(run.path),
    }


def _settings(group: pd.DataFrame) -> str:
    settings = group["run"].iloc[0].settings
    text = escape("\n".join(f"{name}: {value}" for name, value in settings.items() if name != "seed"))
    title = escape(f"{group['problem'].iloc[0]}: {group['method'].iloc[0]}")
    return f"<details><summary>{title}</summary><pre>{text}</pre></details>"
