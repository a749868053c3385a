"""``fedcross-report``: tables, curves and a page from any set of run folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.axes import AXES
from tasks.errors import FedcrossError, StorageError

if TYPE_CHECKING:
    from analysis.summary import Report


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1; write 50 % as 0.5")
    return value


def _round(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a round; rounds count from 1")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``fedcross-report``."""
    line = argparse.ArgumentParser(
        prog="fedcross-report",
        description="Tables and curves from run folders, mean and spread over seeds, beside the published numbers.",
    )
    line.add_argument("folders", nargs="+", metavar="DIR", type=Path, help="searched recursively for runs")
    line.add_argument("--out", type=Path, metavar="FOLDER", help="where to write (default: 'report' in the first DIR)")
    line.add_argument(
        "--target", nargs="+", type=_share, metavar="SHARE", default=[], help="accuracies to reach, such as 0.5"
    )
    line.add_argument("--x", choices=tuple(AXES), default="rounds", help="x-axis of curves.png (default: rounds)")
    line.add_argument("--unfinished", action="store_true", help="count runs that have not reached their last round")
    line.add_argument(
        "--until", type=_round, metavar="ROUND", help="count rounds up to this one only: runs at equal rounds"
    )
    line.add_argument(
        "--html", action=argparse.BooleanOptionalAction, default=True, help="write the interactive page report.html"
    )
    return line


def write_report(
    folders: Sequence[str | Path],
    out: Path,
    targets: Sequence[float] = (),
    x: str = "rounds",
    unfinished: bool = False,
    html: bool = True,
    until: int | None = None,
) -> str:
    """Read the runs below `folders` and write the report into `out`.

    Files: ``report.md``, ``report.csv``, ``report.tex``, ``curves.png``, ``report.html``, and ``ablation.png`` where
    FedCross ran with several alphas and selections.

    Parameters
    ----------
    folders : sequence of path
        Searched recursively.
    out : Path
        Made if it is not there.
    targets : sequence of float
        Accuracies in (0, 1); if empty, the highest multiple of 5 % that every run reached.
    x : str
        A key of ``AXES``.
    unfinished : bool
        Count runs that have not reached their last round.
    html : bool
        Write the interactive page. It needs plotly (the extra ``analysis``); without it a note says so.
    until : int, optional
        Count rounds up to this one only.

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
    from analysis.groups import group_runs
    from analysis.loading import load_runs
    from analysis.summary import build

    loaded = load_runs(folders, unfinished, until)
    groups, notes = group_runs(loaded.runs)
    if html and find_spec("plotly") is None:
        html = False
        notes.append("report.html was not written: it needs plotly. Install the extra: fedcross[analysis]")
    report = build(groups, [*loaded.notes, *notes], targets)
    try:
        out.mkdir(parents=True, exist_ok=True)
        _write(report, out, x, html)
    except OSError as error:
        raise StorageError(f"{out}: cannot be written ({error.strerror}). Choose another folder with --out.") from error
    return report.markdown()


def _write(report: Report, out: Path, x: str, html: bool) -> None:
    from analysis import formats
    from analysis.ablation import plot_grids
    from analysis.curves import plot_curves

    (out / "report.md").write_text(report.markdown(), encoding="utf-8")
    (out / "report.csv").write_text(formats.csv_text(report.groups), encoding="utf-8")
    (out / "report.tex").write_text(formats.latex(report.tables), encoding="utf-8")
    plot_curves(report.groups, x, out / "curves.png")
    if report.grids:
        plot_grids(report.grids, out / "ablation.png")
    if html:
        from analysis.page import page

        (out / "report.html").write_text(page(report, x), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``fedcross-report``; return the exit code (0, or 2 for wrong use and for folders without a run)."""
    options = parser().parse_args(arguments)
    out = options.out or options.folders[0] / "report"
    try:
        text = write_report(
            options.folders, out, options.target, options.x, options.unfinished, options.html, options.until
        )
        print(text)
    except FedcrossError as error:
        print(f"fedcross-report: {error}", file=sys.stderr)
        return error.exit_code
    print(f"Written to {out}", file=sys.stderr)
    return 0
