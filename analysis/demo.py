"""The last step of ``make demo``: prints the table of both methods and plots their learning curves."""

from __future__ import annotations

import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Print the table of the runs below `folder` and draw ``curves.png`` into it."""
    from rich.console import Console

    from fedcross.analysis.curves import plot_curves
    from fedcross.analysis.groups import group_runs
    from fedcross.analysis.loading import load_runs
    from fedcross.analysis.table import console_table

    runs = load_runs([folder]).runs
    Console().print(console_table(runs))
    picture = folder / "curves.png"
    plot_curves(group_runs(runs)[0], "rounds", picture)
    print(f"Curves: {picture}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
