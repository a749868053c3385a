"""``fedcross audit RUN [--devices [--slot 3]]``: checks a run's audit trail, and shows which devices trained its model.

The exit code is 0 if the chain holds, 1 if it does not, 2 for wrong use.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedcross.server.audit import NAME, check
from fedcross.strategies.round.slot import ACCEPTED, NOT_NEEDED
from fedcross.strategies.wire.records import LOST

SHOWN = 20


def devices(lines: Iterable[Mapping[str, Any]], slot: int | None = None) -> str:
    """Return a table of the devices in `lines`; with `slot`, only of what happened with that slot's model."""
    found: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        if "verdict" in line and slot in (None, line.get("slot")):
            who = tuple("-" if line.get(name) is None else str(line[name]) for name in ("client", "node", "key"))
            found.setdefault(who, []).append(line)
    rows: list[tuple[str, ...]] = [("client", "node", "key", "accepted", "rejected", "lost", "rounds")]
    for who in sorted(found, key=lambda who: (who[0].zfill(9), who)):
        verdicts = [line["verdict"] for line in found[who]]
        rounds = [line.get("round", 0) for line in found[who] if line["verdict"] == ACCEPTED]
        rejected = sum(verdict not in (ACCEPTED, LOST, NOT_NEEDED) for verdict in verdicts)
        span = f"{min(rounds)}-{max(rounds)}" if rounds else "-"
        rows.append((*who, str(verdicts.count(ACCEPTED)), str(rejected), str(verdicts.count(LOST)), span))
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
