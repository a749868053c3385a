"""``fedcross report``: writes tables, curves and a page from any set of run folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedcross.analysis.runs import AXES
from fedcross.server.commands.options import share


def _round(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a round; rounds count from 1")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``fedcross report``."""
    line = argparse.ArgumentParser(
        prog="fedcross report",
        description="Tables and curves from run folders: mean and spread over seeds, beside the published numbers.",
    )
    line.add_argument("folders", nargs="+", metavar="DIR", type=Path, help="searched recursively for runs")
    line.add_argument("--out", type=Path, metavar="FOLDER", help="where to write (default: 'report' in the first DIR)")
    line.add_argument(
        "--target", nargs="+", type=share, metavar="SHARE", default=[], help="accuracies to reach, such as 0.5"
    )
    line.add_argument(
        "--at", nargs="+", type=_round, metavar="ROUND", default=[], help="rounds whose accuracy is shown"
    )
    line.add_argument("--x", choices=tuple(AXES), default="rounds", help="x-axis of curves.png (default: rounds)")
    line.add_argument("--unfinished", action="store_true", help="include runs that have not reached their last round")
    line.add_argument(
        "--until", type=_round, metavar="ROUND", help="use only rounds up to this one, to compare runs at equal rounds"
    )
    line.add_argument(
        "--every",
        type=_round,
        metavar="ROUNDS",
        help="use only evaluations at multiples of this, to compare runs that were evaluated at other intervals",
    )
    line.add_argument(
        "--html", action=argparse.BooleanOptionalAction, default=True, help="write the interactive page report.html"
    )
    return line


def main(arguments: Sequence[str]) -> int:
    """Run ``fedcross report``; return the exit code (0, or 2 for wrong use and for folders without a run)."""
    from fedcross.analysis.report import write_report

    options = parser().parse_args(arguments)
    out = options.out or options.folders[0] / "report"
    text = write_report(
        options.folders,
        out,
        options.target,
        options.x,
        options.unfinished,
        options.html,
        options.until,
        options.at,
        options.every,
    )
    print(text)
    print(f"Written to {out}", file=sys.stderr)
    return 0
