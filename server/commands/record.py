"""``fedcross record``: small records of finished runs for the repository, and the page of results made from them."""

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
        description="Keep small records of finished runs, and make the page of results from all records.",
    )
    line.add_argument("folders", nargs="*", metavar="DIR", type=Path, help="searched for runs; none: only the page")
    line.add_argument("--name", help="what the records are of: a folder of RESULTS")
    line.add_argument("--results", type=Path, default=Path("results"), metavar="RESULTS", help="default: results")
    line.add_argument(
        "--page", type=Path, default=Path("docs/results.md"), metavar="FILE", help="default: docs/results.md"
    )
    line.add_argument(
        "--limit-mb", type=float, default=LIMIT_MB, metavar="MB", help=f"default: {LIMIT_MB:g} for a name"
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
