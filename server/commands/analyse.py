"""``fedcross analyse``: plots of the models that a run kept: t-SNE, Grad-CAM and others."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fedcross.analysis.analyse import KINDS, analyse


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``fedcross analyse``."""
    line = argparse.ArgumentParser(
        prog="fedcross analyse",
        description="Plots of the models that a run kept. Every kind needs snapshots, which no run keeps by itself: "
        "fedcross ... snapshots.rounds=[1,10,100].",
        epilog="kinds: " + "; ".join(f"{name}: {text}" for name, text in KINDS.items()),
    )
    line.add_argument("run", metavar="RUN", type=Path, help="folder of one run")
    line.add_argument("kind", choices=tuple(KINDS), help="what to show")
    line.add_argument(
        "--rounds", nargs="+", type=int, default=[], metavar="N", help="rounds (default: all kept rounds)"
    )
    line.add_argument(
        "--slots", nargs="+", type=int, default=[], metavar="I", help="single models, for tsne and gradcam"
    )
    line.add_argument("--examples", type=int, default=500, metavar="N", help="test examples (default: 500)")
    line.add_argument("--images", nargs="+", type=int, default=[], metavar="I", help="test images for gradcam")
    line.add_argument("--data", type=Path, metavar="DIR", help="folder of the data sets (default: that of the run)")
    line.add_argument("--out", type=Path, metavar="FOLDER", help="folder for the plots (default: 'analysis' in RUN)")
    return line


def main(arguments: Sequence[str]) -> int:
    """Run ``fedcross analyse``; return the exit code (0, or 2 for wrong use and for runs without snapshots)."""
    options = vars(parser().parse_args(arguments))
    for path in analyse(**options):
        print(path)
    return 0
