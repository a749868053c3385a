"""``fedcross audit``: checks a run's audit trail, and tells which devices trained its model.

::

    fedcross audit RUN [--devices [--slot 3]]

The exit code is 0 if the chain holds, 1 if it does not, 2 for wrong use.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcross.server.audit import NAME, check
from fedcross.strategies.round.ledger import ACCEPTED, LOST, NOT_NEEDED

SHOWN = 20


def devices(lines: Iterable[Mapping[str, Any]], slot: int | None = None) -> str:
    """Return a table of the devices in `lines`; with `slot`, only of what happened with that slot's model."""
    verdicts: dict[tuple[str, ...], Counter[str]] = {}
    rounds: dict[tuple[str, ...], set[int]] = {}
    for line in lines:
        if "verdict" not in line or (slot is not None and line.get("slot") != slot):
            continue
        who = tuple("-" if line.get(name) is None else str(line[name]) for name in ("client", "node", "key"))
        verdicts.setdefault(who, Counter())[str(line["verdict"])] += 1
        rounds.setdefault(who, set()).update({line.get("round", 0)} if line["verdict"] == ACCEPTED else set())
    rows = [("client", "node", "key", "accepted", "rejected", "lost", "rounds")]
    for who in sorted(verdicts, key=lambda who: (who[0].zfill(9), who)):
        found, seen = verdicts[who], rounds[who]
        rejected = sum(count for verdict, count in found.items() if verdict not in (ACCEPTED, LOST, NOT_NEEDED))
        span = f"{min(seen)}-{max(seen)}" if seen else "-"
        rows.append((*who, str(found[ACCEPTED]), str(rejected), str(found[LOST]), span))  # type: ignore[arg-type]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(word.rjust(width) for word, width in zip(row, widths)) for row in rows)


def main(arguments: Sequence[str]) -> int:
    """Run ``fedcross audit``; return 1 if the chain does not hold."""
    parser = argparse.ArgumentParser(prog="fedcross audit", description="Check a run's audit trail (log.audit=true).")
    parser.add_argument("folder", metavar="RUN", type=Path, help="the run's folder")
    parser.add_argument("--devices", action="store_true", help="which devices had an upload accepted")
    parser.add_argument("--slot", type=int, metavar="I", help="with --devices: only for the model of slot I of a pool")
    asked = parser.parse_args(arguments)
    lines, faults, ends = check(asked.folder)
    end = f"its end agrees with {' and '.join(ends)}" if ends else "nothing says where it ends"
    print("\n".join([f"{NAME} was changed:", *faults[:SHOWN]]) if faults else f"{NAME}: {len(lines)} lines, {end}")
    if asked.devices:
        print(devices(lines, asked.slot))
        if after := (lines[0].get("after_round") if lines else 0):
            print(f"The trail begins after round {after}: others may have trained the model before.")
    return 1 if faults else 0
