"""``fedcross partition``: examples per client and class, as a table and as the bubble plot of the papers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedcross.analysis.partition_plot import (
    Counts,
    Setup,
    bubble_plot,
    check_plot,
    counts,
    markdown,
    over_seeds,
    rows,
    setup,
    sizes,
)
from fedcross.core.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``fedcross partition``."""
    made = argparse.ArgumentParser(
        prog="fedcross partition",
        description="Show how a partition divides a task's training examples over the clients.",
        epilog="Example: fedcross partition task=cifar10 partition=dirichlet partition.beta=0.1 --plot out.png",
    )
    made.add_argument(
        "overrides", nargs="*", metavar="GROUP=NAME", help="as for fedcross: task=..., partition.beta=..."
    )
    made.add_argument("--plot", type=Path, metavar="FILE", help="write the bubble plot (.png, .pdf, .svg)")
    made.add_argument("--markdown", action="store_true", help="tables in Markdown")
    made.add_argument(
        "--seeds", type=int, default=1, metavar="N", help="show the client sizes over N seeds instead of single clients"
    )
    return made


def main(arguments: Sequence[str]) -> int:
    """Run ``fedcross partition``; return the exit code (0, or 2 for a wrong configuration or data set)."""
    options = parser().parse_intermixed_args(arguments)
    try:
        if options.seeds < 1:
            raise ConfigError(f"--seeds {options.seeds}: give 1 or more.")
        if options.plot:
            check_plot(options.plot)
        chosen = setup(options.overrides)
        if options.seeds > 1:
            show(*over_seeds(chosen, options.seeds), chosen.title, options.markdown)
        if options.seeds == 1 or options.plot:
            table = counts(chosen.task, chosen.split(chosen.seed))
            if options.seeds == 1:
                _show_one(chosen, table, options)
            if options.plot:
                bubble_plot(table, chosen.task.label_names, chosen.title, options.plot)
                print(f"Plot written to {options.plot}", file=sys.stderr)
    except OSError as error:
        print(f"fedcross partition: {options.plot}: cannot be written ({error}).", file=sys.stderr)
        return 2
    return 0


def show(header: Sequence[str], body: Sequence[Sequence[str]], title: str, plain: bool) -> None:
    """Print a table as Markdown or formatted for the terminal."""
    if plain:
        print(f"{title}\n\n{markdown(header, body)}")
        return
    from rich.console import Console
    from rich.table import Table

    drawn = Table(*header, title=title, title_justify="left")
    for column in drawn.columns:
        column.justify = "right"
        column.no_wrap = True
    for line in body:
        drawn.add_row(*line)
    Console().print(drawn)


def _show_one(chosen: Setup, table: Counts, options: Any) -> None:
    show(*rows(table, chosen.task.label_names), chosen.title, options.markdown)
    smallest, median, largest = sizes(table)
    held = np.median(np.count_nonzero(table, axis=1))
    print(
        f"\n{len(table)} clients, {table.sum()} examples; smallest {smallest}, median {median:g}, largest {largest}; "
        f"classes per client: median {held:g} of {table.shape[1]}"
    )
