"""``fedcross analyse``: plots of the models of runs: t-SNE, Grad-CAM, loss surfaces and others."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fedcross.server.commands.options import positive


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``fedcross analyse``."""
    from fedcross.analysis.analyse import KINDS
    from fedcross.server.newcomer import ABOUT

    kinds = {**KINDS, "onboard": ABOUT}
    line = argparse.ArgumentParser(
        prog="fedcross analyse",
        description="Plots of the models of runs. cka, tsne, forgetting and gradcam need snapshots: "
        "fedcross ... snapshots.rounds=[1,10,100]. landscape and onboard take several finished runs.",
        epilog="kinds: " + "; ".join(f"{name}: {text}" for name, text in kinds.items()),
    )
    line.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="folder of a run")
    line.add_argument("kind", choices=tuple(kinds), help="what to show")
    line.add_argument(
        "--rounds", nargs="+", type=int, default=[], metavar="N", help="rounds (default: all kept rounds)"
    )
    line.add_argument(
        "--slots", nargs="+", type=int, default=[], metavar="I", help="single models, for tsne and gradcam"
    )
    line.add_argument("--examples", type=int, default=500, metavar="N", help="test examples (default: 500)")
    line.add_argument("--images", nargs="+", type=int, default=[], metavar="I", help="test images for gradcam")
    line.add_argument("--radius", type=positive, default=1.0, help="landscape: half the length of each axis")
    line.add_argument("--points", type=int, default=21, help="landscape: points along each axis (default: 21)")
    line.add_argument("--seed", type=int, default=1, help="landscape: seed of the directions (default: 1)")
    line.add_argument("--epochs", type=int, default=20, help="onboard: local epochs (default: 20)")
    line.add_argument("--client", type=int, help="onboard: partition id of the newcomer (default: one client more)")
    line.add_argument("--set", nargs="+", default=[], metavar="OVERRIDE", help="onboard: settings added to the runs'")
    line.add_argument("--data", type=Path, metavar="DIR", help="folder of the data sets (default: that of the run)")
    line.add_argument("--out", type=Path, metavar="FOLDER", help="folder for the files (default: 'analysis' in RUN)")
    return line


def main(arguments: Sequence[str]) -> int:
    """Run ``fedcross analyse``; return the exit code (0, or 2 for wrong use and for runs without snapshots)."""
    from fedcross.analysis.analyse import analyse
    from fedcross.analysis.subject import Options
    from fedcross.server.newcomer import onboard

    given = vars(parser().parse_args(arguments))
    runs, kind = given.pop("runs"), given.pop("kind")
    out = given.pop("out") or runs[0] / "analysis"
    newcomer = {name: given.pop(name) for name in ("epochs", "client", "set")}
    if kind == "onboard":
        written = onboard(runs, out, newcomer["epochs"], newcomer["set"], newcomer["client"])
    else:
        lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
        written = analyse(runs, kind, out, Options(**{**given, **lists}))
    for path in written:
        print(path)
    return 0
