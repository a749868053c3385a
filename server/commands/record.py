"""``fedcross record``: writes small records of runs into the repository, and the results page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fedcross.analysis.records import LIMIT_MB, record, write_page
from fedcross.core.errors import ConfigError
from fedcross.server.commands.options import not_negative, positive


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``fedcross record``."""
    line = argparse.ArgumentParser(
        prog="fedcross record",
        description="Write small records of finished runs, and the results page from all records.",
        epilog="fedcross record verify NAME runs random rounds of a record again and compares.",
    )
    line.add_argument(
        "folders",
        nargs="*",
        metavar="DIR",
        type=Path,
        help="folders to search for runs (default: none, write the page only)",
    )
    line.add_argument(
        "--checkpoints", type=int, default=0, metavar="N", help="checkpoints that each record takes along (default: 0)"
    )
    line.add_argument("--name", help="name of the records: a folder of RESULTS")
    line.add_argument("--results", type=Path, default=Path("results"), metavar="RESULTS", help="default: results")
    line.add_argument(
        "--page", type=Path, default=Path("docs/results.md"), metavar="FILE", help="default: docs/results.md"
    )
    line.add_argument(
        "--limit-mb",
        type=positive,
        default=LIMIT_MB,
        metavar="MB",
        help=f"largest size of one name's records (default: {LIMIT_MB:g})",
    )
    return line


def main(arguments: Sequence[str]) -> int:
    """Run ``fedcross record``; return the exit code (0, 1 if a record is not confirmed, or 2 for wrong use)."""
    if arguments[:1] == ["verify"]:
        return _verify(arguments[1:])
    options = parser().parse_args(arguments)
    if bool(options.folders) != bool(options.name):
        raise ConfigError("DIR and --name belong together: fedcross record DIR... --name NAME. Give both or none.")
    for folder in (
        record(options.folders, options.name, options.results, options.limit_mb, options.checkpoints)
        if options.name
        else []
    ):
        print(folder)
    write_page(options.results, options.page)
    print(options.page)
    return 0


def verifier() -> argparse.ArgumentParser:
    """Return the command line of ``fedcross record verify``."""
    line = argparse.ArgumentParser(
        prog="fedcross record verify",
        description="Run random rounds of recorded runs again, each from the checkpoint before it, and compare.",
        epilog="Rounds can be run again that follow a checkpoint in the record or in RUN; without any, the first ones, "
        "up to a digest.",
    )
    line.add_argument("name", metavar="NAME", help="a folder of RESULTS, or NAME/FOLDER: one record")
    line.add_argument("--results", type=Path, default=Path("results"), metavar="RESULTS", help="default: results")
    line.add_argument("--data-root", type=Path, metavar="DIR", help="where the data sets lie")
    line.add_argument("--rounds", type=int, default=5, metavar="N", help="rounds of each record (default: 5)")
    line.add_argument("--run", type=Path, metavar="RUN", help="the recorded run's folder, for its checkpoints")
    line.add_argument("--seed", type=int, default=0, help="chooses the rounds (default: 0)")
    line.add_argument(
        "--tolerance",
        type=not_negative,
        default=0.02,
        metavar="SHARE",
        help="largest relative difference of a loss, absolute of an accuracy, on another processor (default: 0.02)",
    )
    return line


def _verify(arguments: Sequence[str]) -> int:
    from fedcross.server.verify import Verdict, verify

    options = verifier().parse_args(arguments)
    found = verify(
        options.results / options.name, options.rounds, options.seed, options.tolerance, options.data_root, options.run
    )
    for one in found:
        print(f"{one.record}  round {one.number}  {one.verdict.value}  {one.detail}")
    return int(any(one.verdict in (Verdict.DIFFERS, Verdict.UNCOMPARED) for one in found))
