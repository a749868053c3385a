"""``fedcross partition``: examples per client and class, as a table and as the bubble plot of the papers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedcross.core.errors import ConfigError

if TYPE_CHECKING:
    import pandas as pd


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
    from fedcross.analysis.partition_plot import bubble_plot, client_table, over_seeds, setup, sizes

    options = parser().parse_intermixed_args(arguments)
    if options.seeds < 1:
        raise ConfigError(f"--seeds {options.seeds}: give 1 or more.")
    chosen = setup(options.overrides)
    counts = chosen.counts(chosen.seed)
    if options.plot:
        try:
            bubble_plot(counts, chosen.title, options.plot)
        except OSError as error:
            print(f"fedcross partition: {options.plot}: cannot be written ({error}).", file=sys.stderr)
            return 2
    if options.seeds > 1:
        _show(over_seeds(chosen, options.seeds), chosen.title, options.markdown)
    else:
        _show(client_table(counts), chosen.title, options.markdown)
        text = ", ".join(f"{name} {size:g}" for name, size in sizes(counts).items())
        held = (counts > 0).sum(axis=1).median()
        print(
            f"\n{len(counts)} clients, {counts.to_numpy().sum()} examples; {text}; "
            f"classes per client: median {held:g} of {counts.shape[1]}"
        )
    if options.plot:
        print(f"Plot written to {options.plot}", file=sys.stderr)
    return 0


def _show(table: pd.DataFrame, title: str, plain: bool) -> None:
    """Print a table as Markdown or formatted for the terminal."""
    rows = [list(table.columns), *table.to_numpy().tolist()]
    if plain:
        rows.insert(1, ["---:"] * table.shape[1])
        print(f"{title}\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows))
        return
    from rich.console import Console
    from rich.table import Table

    drawn = Table(*rows[0], title=title, title_justify="left")
    for column in drawn.columns:
        column.justify, column.no_wrap = "right", True
    for row in rows[1:]:
        drawn.add_row(*row)
    Console().print(drawn)
