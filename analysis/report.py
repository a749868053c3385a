"""``fedcross report``: writes tables, curves and a page from any set of run folders and records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import pandas as pd

from fedcross.analysis import tables
from fedcross.analysis.plots import Grid, grids, plot_curves, plot_grids
from fedcross.analysis.published import accuracy_cells
from fedcross.analysis.records import load_runs
from fedcross.analysis.runs import runs_frame
from fedcross.analysis.table import Table, published_name
from fedcross.core.errors import StorageError


@dataclass(frozen=True)
class Report:
    """The content of a report: a row for each run, tables, ablation grids, and sentences about folders."""

    frame: pd.DataFrame
    tables: list[Table]
    grids: list[Grid]
    notes: list[str]

    @property
    def title(self) -> str:
        """The title: the problem, or how many there are."""
        problems = self.frame["problem"].unique()
        return f"FedCross report: {problems[0] if len(problems) == 1 else f'{len(problems)} problems'}"

    @property
    def summary(self) -> str:
        """One sentence: which method is best, and by how much."""
        problem = self.frame["problem"].iloc[0]
        means = self.frame.groupby(["problem", "method"], sort=False)["smoothed"].mean()[problem]
        ranked = (100 * means.sort_values(ascending=False)).rename(index=published_name)
        best = f"{ranked.index[0]} reaches {ranked.iloc[0]:.2f} %"
        if len(ranked) > 1:
            best += f", {ranked.iloc[0] - ranked.iloc[1]:.2f} points above {ranked.index[1]}"
        runs = f"{len(self.frame)} run{'s' * (len(self.frame) > 1)}"
        return f"{runs}: on {problem}, {best} (best mean of 10 evaluations)."

    def markdown(self) -> str:
        """Return the text of ``report.md``."""
        pictures = ["![Test accuracy](curves.png)\n"] + (["![Ablation](ablation.png)\n"] if self.grids else [])
        parts = [*(table.markdown() for table in self.tables), *pictures]
        if self.notes:
            parts.append("## Notes\n\n" + "".join(f"- {note}\n" for note in self.notes))
        return f"# {self.title}\n\n{date.today():%d %B %Y}\n\n{self.summary}\n\n" + "\n".join(parts)

    def latex(self) -> str:
        """Return the text of ``report.tex``."""
        head = f"% {self.title}, {date.today():%d %B %Y}. Needs \\usepackage{{booktabs}}.\n"
        return "\n".join([head, *(table.latex() for table in self.tables)])

    def csv(self) -> str:
        """Return one line of plain numbers per configuration: accuracies in percent, bytes, seconds."""
        accuracies, costs = ["final", "best", "smoothed", "window_std", "last_ten"], ["bytes", "seconds"]
        percent = self.frame.assign(**{name: 100 * self.frame[name] for name in accuracies})
        grouped = percent.groupby("group", sort=False)
        found = grouped[accuracies + costs].agg(["mean", "std"])
        found.columns = [f"{name}_{what}" for name, what in found.columns]
        head = grouped[["problem", "method"]].first()
        head["seeds"] = grouped.size()
        settings = [run.settings for run in grouped["run"].first()]
        for name in ("task.name", "model.name", "partition.name", "partition.beta", "method.name"):
            head[name] = [values.get(name) for values in settings]
        papers = [next(iter(accuracy_cells(values)), None) for values in settings]
        head["published"] = [paper and paper.value for paper in papers]
        head["published_source"] = [paper and paper.source for paper in papers]
        text: str = head.join(found).to_csv(index=False, float_format="%.10g", lineterminator="\n")
        return text


def build(frame: pd.DataFrame, notes: Sequence[str], targets: Sequence[float] = (), at: Sequence[int] = ()) -> Report:
    """Return everything a report shows about the runs in `frame`; `targets` and `at` as in :func:`write_report`."""
    wanted, found = list(targets) or tables.default_target(frame), grids(frame)
    parts = [
        tables.accuracy_table(frame),
        tables.metrics_table(frame),
        tables.clients_table(frame),
        tables.at_table(frame, at) if at else None,
        tables.width_table(frame),
        tables.published_table(frame),
        tables.target_table(frame, wanted) if wanted else None,
        tables.significance_table(frame),
        *tables.ablation_tables(found),
    ]
    meanings = [
        f"{method}, seed {run.seed}: {run.info[name]['meaning']}"
        for method, run in zip(frame["method"], frame["run"], strict=True)
        for name in ("stopped", "privacy")
        if (run.info.get(name) or {}).get("meaning")
    ]
    return Report(frame, [part.compact() for part in parts if part is not None], found, [*meanings, *notes])


def write_report(
    folders: Sequence[str | Path],
    out: Path,
    targets: Sequence[float] = (),
    x: str = "rounds",
    unfinished: bool = False,
    html: bool = True,
    until: int | None = None,
    at: Sequence[int] = (),
    every: int | None = None,
) -> str:
    """Write the report on the runs below `folders` into `out`, and return the text of ``report.md``.

    Files: ``report.md``, ``report.csv``, ``report.tex``, ``report.html`` (if `html`), ``curves.png`` over axis `x`, and
    ``ablation.png`` where FedCross ran with several alphas and selections. `targets` are accuracies in (0, 1); if
    empty, the highest multiple of 5 % that every run reached. `at` names rounds whose accuracy is shown. `unfinished`,
    `until` and `every` as in :func:`~fedcross.analysis.records.load_runs`. A DataError says that there is no run, a
    StorageError that `out` cannot be written.
    """
    runs, notes = load_runs(folders, unfinished, until, every)
    frame, twice = runs_frame(runs)
    notes += twice
    if html and find_spec("plotly") is None:
        html = False
        notes.append("report.html needs plotly: pip install 'fedcross[analysis]'")
    notes += [f"only rounds up to {until} count (--until)"] if until is not None else []
    notes += [f"only evaluations in rounds that {every} divides count (--every)"] if every is not None else []
    report = build(frame, notes, targets, at)
    texts = {"report.md": report.markdown(), "report.csv": report.csv(), "report.tex": report.latex()}
    if html:
        from fedcross.analysis.page import page

        texts["report.html"] = page(report, x)
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (out / name).write_text(text, encoding="utf-8")
        plot_curves(frame, x, out / "curves.png")
        if report.grids:
            plot_grids(report.grids, out / "ablation.png")
    except OSError as error:
        raise StorageError(f"{out}: cannot be written ({error.strerror}). Choose another folder with --out.") from error
    return texts["report.md"]
