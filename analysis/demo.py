"""The last step of ``make demo``: prints the table of both methods and plots their learning curves."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

from fedcross.analysis.curves import plot_curves
from fedcross.analysis.frames import load_runs
from fedcross.analysis.labels import runs_frame
from fedcross.analysis.tables import console_table


def main(folder: Path) -> None:
    """Print the table of the runs below `folder` and draw ``curves.png`` into it."""
    runs, _ = load_runs([folder])
    Console().print(console_table(runs))
    plot_curves(runs_frame(runs)[0], "rounds", folder / "curves.png")
    print(f"Curves: {folder / 'curves.png'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
