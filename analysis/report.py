"""``fedcross-report``: tables and curves from any set of run folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.runs import AXES
from tasks.errors import FedcrossError, StorageError


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1; write 50 % as 0.5")
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
    return line


def write_report(
    folders: Sequence[str | Path],
    out: Path,
    targets: Sequence[float] = (),
    x: str = "rounds",
    unfinished: bool = False,
) -> str:
    """Read the runs below `folders` and write ``report.md``, ``report.csv`` and ``curves.png`` into `out`.

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
    from analysis import tables
    from analysis.curves import plot_curves
    from analysis.groups import group_runs
    from analysis.runs import load_runs

    loaded = load_runs(folders, unfinished)
    groups, notes = group_runs(loaded.runs)
    wanted = list(targets) or [t for t in [tables.default_target(groups)] if t == t]
    parts = [tables.markdown(tables.accuracy_table(groups))]
    if wanted:
        parts.append(tables.markdown(tables.target_table(groups, wanted)))
    parts.append("![Test accuracy](curves.png)\n")
    if loaded.notes or notes:
        parts.append("## Notes\n\n" + "".join(f"- {note}\n" for note in [*loaded.notes, *notes]))
    text = "# Report\n\n" + "\n".join(parts)
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "report.md").write_text(text, encoding="utf-8")
        (out / "report.csv").write_text(tables.csv_text(groups), encoding="utf-8")
        plot_curves(groups, x, out / "curves.png")
    except OSError as error:
        raise StorageError(f"{out}: cannot be written ({error.strerror}). Choose another folder with --out.") from error
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``fedcross-report``; return the exit code (0, or 2 for wrong use and for folders without a run)."""
    options = parser().parse_args(arguments)
    out = options.out or options.folders[0] / "report"
    try:
        print(write_report(options.folders, out, options.target, options.x, options.unfinished))
    except FedcrossError as error:
        print(f"fedcross-report: {error}", file=sys.stderr)
        return error.exit_code
    print(f"Written to {out}", file=sys.stderr)
    return 0
