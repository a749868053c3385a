"""``fedcross report``: writes tables, curves and a page from any set of run folders."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcross.analysis.runs import AXES


def _round(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a round; rounds count from 1")
    return value


def _share(text: str) -> float:
    if not 0 < (value := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1; write 50 % as 0.5")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``fedcross report``."""
    line = argparse.ArgumentParser(
        prog="fedcross report",
        description="Tables and curves from run folders: mean and spread over seeds, beside the published numbers.",
    )
    rounds: dict[str, Any] = {"type": _round, "metavar": "ROUND"}
    line.add_argument("folders", nargs="+", metavar="DIR", type=Path, help="searched recursively for runs")
    line.add_argument("--out", type=Path, metavar="FOLDER", help="where to write (default: 'report' in the first DIR)")
    line.add_argument("--target", nargs="+", type=_share, metavar="SHARE", default=[], help="accuracies to reach: 0.5")
    line.add_argument("--at", nargs="+", **rounds, default=[], help="rounds whose accuracy is shown")
    line.add_argument("--x", choices=tuple(AXES), default="rounds", help="x-axis of curves.png (default: rounds)")
    line.add_argument("--unfinished", action="store_true", help="include runs that have not reached their last round")
    line.add_argument("--until", **rounds, help="use only rounds up to this one, to compare runs at equal rounds")
    line.add_argument("--every", **rounds, help="use only evaluations at multiples of this, to compare other intervals")
    html = argparse.BooleanOptionalAction
    line.add_argument("--html", action=html, default=True, help="write the interactive page report.html")
    return line


def main(arguments: Sequence[str]) -> int:
    """Run ``fedcross report``; return the exit code (0, or 2 for wrong use and for folders without a run)."""
    from fedcross.analysis.report import write_report

    asked = parser().parse_args(arguments)
    out = asked.out or asked.folders[0] / "report"
    options = (asked.target, asked.x, asked.unfinished, asked.html, asked.until, asked.at, asked.every)
    print(write_report(asked.folders, out, *options))
    print(f"Written to {out}", file=sys.stderr)
    return 0
