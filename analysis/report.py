"""``fedcross report``: writes tables, curves and a page from any set of run folders."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fedcross.core.errors import StorageError

if TYPE_CHECKING:
    from fedcross.analysis.summary import Report


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
    """Read the runs below `folders` and write the report into `out`.

    Files: ``report.md``, ``report.csv``, ``report.tex``, ``curves.png``, ``report.html``, ``ablation.png`` where
    FedCross ran with several alphas and selections, and ``visits.png`` for asynchronous runs.

    Parameters
    ----------
    folders : sequence of path
        Searched recursively.
    out : Path
        Created if it does not exist.
    targets : sequence of float
        Accuracies in (0, 1); if empty, the highest multiple of 5 % that every run reached.
    x : str
        A key of ``AXES``.
    unfinished : bool
        Include runs that have not reached their last round.
    html : bool
        Write the interactive page, which needs plotly (the extra ``analysis``). Without plotly, the report has a note.
    until : int, optional
        Use only rounds up to this one.
    at : sequence of int
        Rounds whose accuracy is shown; none: no such table.
    every : int, optional
        Use only the evaluations of every such round.

    Returns
    -------
    str
        The text of ``report.md``.

    Raises
    ------
    DataError
        If there is no run.
    StorageError
        If `out` cannot be written.
    """
    from fedcross.analysis.groups import group_runs
    from fedcross.analysis.loading import load_runs
    from fedcross.analysis.summary import build

    loaded = load_runs(folders, unfinished, until, every)
    groups, notes = group_runs(loaded.runs)
    if html and find_spec("plotly") is None:
        html = False
        notes.append("report.html was not written: it needs plotly. In the checkout: pip install -e '.[analysis]'")
    if until is not None:
        notes.append(f"only rounds up to {until} count (--until)")
    if every is not None:
        notes.append(
            f"only evaluations in rounds that {every} divides count (--every), in every table; rounds, bytes and time "
            "are of all rounds"
        )
    report = build(groups, [*loaded.notes, *notes], targets, at)
    try:
        out.mkdir(parents=True, exist_ok=True)
        _write(report, out, x, html)
    except OSError as error:
        raise StorageError(f"{out}: cannot be written ({error.strerror}). Choose another folder with --out.") from error
    return report.markdown()


def _write(report: Report, out: Path, x: str, html: bool) -> None:
    from fedcross.analysis import formats
    from fedcross.analysis.ablation import plot_grids
    from fedcross.analysis.curves import plot_curves
    from fedcross.analysis.visits import plot_visits

    (out / "report.md").write_text(report.markdown(), encoding="utf-8")
    (out / "report.csv").write_text(formats.csv_text(report.groups), encoding="utf-8")
    (out / "report.tex").write_text(formats.latex(report.tables), encoding="utf-8")
    plot_curves(report.groups, x, out / "curves.png")
    if report.grids:
        plot_grids(report.grids, out / "ablation.png")
    if report.visits:
        plot_visits(report.visits, out / "visits.png")
    if html:
        from fedcross.analysis.page import page

        (out / "report.html").write_text(page(report, x), encoding="utf-8")
