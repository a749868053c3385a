"""``fedcross landscape``: loss surfaces around the global models of runs, side by side on the same axes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fedcross.server.commands.options import positive


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``fedcross landscape``."""
    line = argparse.ArgumentParser(
        prog="fedcross landscape",
        description="Loss surfaces and sharpness of finished runs on the same axes, and the diversity of their pools.",
    )
    line.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="folders of finished runs")
    line.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where to write (default: 'analysis' in the first RUN)"
    )
    line.add_argument("--data", type=Path, metavar="DIR", help="folder of the data sets (default: that of the run)")
    line.add_argument("--radius", type=positive, default=1.0, help="half the length of each axis (default: 1)")
    line.add_argument("--points", type=int, default=21, help="points along each axis (default: 21)")
    line.add_argument("--examples", type=int, default=500, help="test examples (default: 500)")
    line.add_argument("--seed", type=int, default=1, help="seed of the random directions (default: 1)")
    return line


def main(arguments: Sequence[str]) -> int:
    """Run ``fedcross landscape``; return the exit code (0, or 2 for wrong use)."""
    from fedcross.analysis.landscape import landscape

    options = vars(parser().parse_args(arguments))
    options["out"] = options["out"] or options["runs"][0] / "analysis"
    for path in landscape(**options):
        print(path)
    return 0
