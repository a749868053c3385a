"""Injects faults into real processes and checks that each is named, rightly and in time.

::

    python -m tests.faults.injections                       # all of them, with a table
    python -m tests.faults.injections no_data port_taken
    python -m tests.faults.injections --write               # ... and the table into docs/reliability.md

The time counts from the fault to the line that names it: from the command's start where the fault is there before,
from the moment at which something breaks where a run goes on. At most LIMIT_S. Needs root, for small disks.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.common import write_section
from fedcross.core.causes import CAUSES
from tests.faults.injected_federation import FEDERATION, shared
from tests.faults.injected_here import HERE, Injection
from tests.support.injection import LIMIT_S, ROOT, Bench, Told

WHO = {cause.name: cause.who for cause in CAUSES}


def row(name: str, how: Injection, told: Told) -> str:
    """Return a line of the table."""
    what = " ".join((how.__doc__ or "").split()).rstrip(".")
    named = ", ".join(f"`{one}`" for one in told.names) or "nothing"
    ok = "yes" if told.right(name) else "**no**"
    code = "-" if told.code is None else told.code
    return f"| `{name}` | {what} | {named} | {told.seconds:.1f} | {code} | {ok} |"


def inject(name: str, how: Injection, work: Path) -> Told:
    """Return what was said of one fault."""
    with Bench(work / name) as bench:
        return how(bench)


def main() -> int:
    """Print the table; return 1 if a fault was not named rightly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CAUSE", help="default: all")
    parser.add_argument("--write", action="store_true", help="write the table into docs/reliability.md")
    asked = parser.parse_args()
    chosen = {name: how for name, how in {**HERE, **FEDERATION}.items() if not asked.names or name in asked.names}
    rows, right = [], 0
    with tempfile.TemporaryDirectory(prefix="fedcross-faults-") as place:
        work = Path(place)

        def go(part: dict[str, Injection]) -> None:
            nonlocal right
            for name, how in part.items():
                told = inject(name, how, work)
                right += told.right(name)
                rows.append(row(name, how, told))
                print(rows[-1], flush=True)
                if not told.right(name):
                    print(told.text[-1500:], file=sys.stderr, flush=True)

        go({name: how for name, how in chosen.items() if name in HERE})
        if over := {name: how for name, how in chosen.items() if name in FEDERATION}:
            with shared(work / "network"):
                go(over)
    head = f"{right} of {len(rows)} faults named rightly within {LIMIT_S:.0f} s"
    load = ", ".join(f"{value:.0f}" for value in os.getloadavg())
    print(f"{head} (load {load})")
    if asked.write:
        table = "| fault | injected | named | seconds | exit code | right |\n|---|---|---|---|---|---|\n" + "\n".join(
            rows
        )
        when = f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores shared with other work, load at the end {load}"
        write_section("injections", f"{head} ({when}).\n\n{table}", ROOT / "docs" / "reliability.md")
    return int(right < len(rows))


if __name__ == "__main__":
    sys.exit(main())
