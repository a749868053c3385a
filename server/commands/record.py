"""``fedcross record``: writes small records of runs into the repository."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``fedcross record``."""
    line = argparse.ArgumentParser(
        prog="fedcross record",
        description="Write small records of finished runs into the repository.",
        epilog="fedcross record verify TABLE runs the first rounds of records again and compares.",
    )
    line.add_argument("folders", nargs="+", metavar="DIR", type=Path, help="folders to search for runs")
    line.add_argument("--name", required=True, help="name of the table: a folder of RESULTS")
    line.add_argument("--results", type=Path, default=Path("results"), metavar="RESULTS", help="default: results")
    return line


def verifier() -> argparse.ArgumentParser:
    """Return the command line of ``fedcross record verify``."""
    from fedcross.server.commands.verify import ROUNDS

    line = argparse.ArgumentParser(
        prog="fedcross record verify", description="Run the first rounds of recorded runs again and compare."
    )
    line.add_argument("table", metavar="TABLE", help="a folder of RESULTS")
    line.add_argument("--run", default="", metavar="NAME", help="one record of it (default: all)")
    line.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"most rounds (default: {ROUNDS})")
    line.add_argument("--results", type=Path, default=Path("results"), metavar="RESULTS", help="default: results")
    line.add_argument("--data-root", type=Path, metavar="DIR", help="where the data sets are")
    return line


def main(arguments: Sequence[str]) -> int:
    """Run ``fedcross record``; return the exit code (0, 1 if a record is not confirmed, or 2 for wrong use)."""
    if arguments[:1] == ["verify"]:
        return _verify(arguments[1:])
    from fedcross.analysis.records import record

    options = parser().parse_args(arguments)
    for note in record(options.folders, options.name, options.results):
        print(note, file=sys.stderr)
    print(options.results / options.name)
    return 0


def _verify(arguments: Sequence[str]) -> int:
    from fedcross.server.commands.verify import verify

    options = verifier().parse_args(arguments)
    confirmed = True
    for one in verify(options.results / options.table, options.run, options.rounds, options.data_root):
        verdict = {True: "confirmed", False: "DIFFERS", None: "NOT COMPARED"}[one.same]
        print(f"{one.record}  round {one.round}  {verdict}  {one.detail}", flush=True)
        confirmed &= one.same is True
    return 0 if confirmed else 1
