"""``fedcross partition``: examples per client and class, as a table and as the bubble plot of the papers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedcross.analysis.partition_plot import bubble_plot, client_table, over_seeds, setup, sizes
from fedcross.core.errors import ConfigError, StorageError

if TYPE_CHECKING:
    import pandas as pd


def parser() -> argparse.ArgumentParser:
    """Return the parser of ``fedcross partition``."""
    made = argparse.ArgumentParser(
        prog="fedcross partition",
        description="Show how a partition divides a task's training examples over the clients.",
        epilog="Example: fedcross partition task=cifar10 partition=dirichlet partition.beta=0.1 --plot out.png",
    )
    settings = "as for fedcross: task=..., partition.beta=..."
    made.add_argument("overrides", nargs="*", metavar="GROUP=NAME", help=settings)
    made.add_argument("--plot", type=Path, metavar="FILE", help="write the bubble plot (.png, .pdf, .svg)")
    made.add_argument("--markdown", action="store_true", help="tables in Markdown")
    seeds = "show the client sizes over N seeds instead of single clients"
    made.add_argument("--seeds", type=int, default=1, metavar="N", help=seeds)
    return made


def main(arguments: Sequence[str]) -> int:
    """Run ``fedcross partition``; return the exit code (0, or 2 for a wrong configuration or data set)."""
    options = parser().parse_intermixed_args(arguments)
    if options.seeds < 1:
        raise ConfigError(f"--seeds {options.seeds}: give 1 or more.")
    chosen = setup(options.overrides)
    counts = chosen.counts()
    if options.plot:
        try:
            bubble_plot(counts, chosen.title, options.plot)
        except OSError as error:
            raise StorageError(f"{options.plot}: cannot be written ({error}).") from error
        print(f"Plot written to {options.plot}", file=sys.stderr)
    if options.seeds > 1:
        _show(over_seeds(chosen, options.seeds), chosen.title, options.markdown)
        return 0
    _show(client_table(counts), chosen.title, options.markdown)
    text = ", ".join(f"{name} {size:g}" for name, size in sizes(counts).items())
    held = f"classes per client: median {(counts > 0).sum(axis=1).median():g} of {counts.shape[1]}"
    print(f"\n{len(counts)} clients, {counts.to_numpy().sum()} examples; {text}; {held}")
    return 0


def _show(table: pd.DataFrame, title: str, markdown: bool) -> None:
    """Print a table of texts, as Markdown or aligned for the terminal."""
    if not markdown:
        print(f"{title}\n\n{table.to_string(index=False)}")
        return
    rows = [list(table.columns), ["---:"] * table.shape[1], *table.to_numpy().tolist()]
    print(f"{title}\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows))
