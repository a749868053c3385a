"""``fedcross record``: writes small records of runs into the repository, and the results page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fedcross.analysis.records import LIMIT_MB, record, write_page
from fedcross.core.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``fedcross record``."""
    line = argparse.ArgumentParser(
        prog="fedcross record",
        description="Write small records of finished runs, and the results page from all records.",
    )
    line.add_argument(
        "folders",
        nargs="*",
        metavar="DIR",
        type=Path,
        help="folders to search for runs (default: none, write the page only)",
    )
    line.add_argument("--name", help="name of the records: a folder of RESULTS")
    line.add_argument("--results", type=Path, default=Path("results"), metavar="RESULTS", help="default: results")
    line.add_argument(
        "--page", type=Path, default=Path("docs/results.md"), metavar="FILE", help="default: docs/results.md"
    )
    line.add_argument(
        "--limit-mb",
        type=float,
        default=LIMIT_MB,
        metavar="MB",
        help=f"largest size of one name's records (default: {LIMIT_MB:g})",
    )
    return line


def main(arguments: Sequence[str]) -> int:
    """Run ``fedcross record``; return the exit code (0, or 2 for wrong use)."""
    options = parser().parse_args(arguments)
    if bool(options.folders) != bool(options.name):
        raise ConfigError("DIR and --name belong together: fedcross record DIR... --name NAME. Give both or none.")
    for folder in record(options.folders, options.name, options.results, options.limit_mb) if options.name else []:
        print(folder)
    write_page(options.results, options.page)
    print(options.page)
    return 0
