"""``fedcross audit``: checks a run's audit trail, and tells which devices trained its model.

::

    fedcross audit RUN                     # is the chain whole?
    fedcross audit RUN --devices           # also: which devices had an upload accepted, in which rounds
    fedcross audit RUN --devices --slot 3  # only for the model of slot 3

The exit code is 0 if the chain holds, 1 if it does not, 2 for wrong use.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedcross.server.audit import NAME, Checked, check, lines_of
from fedcross.strategies.round.trail import ACCEPTED, LOST, NOT_NEEDED

#: Most faults that are printed.
SHOWN = 20


@dataclass
class Device:
    """What the trail tells of one client on one node.

    Attributes
    ----------
    client, node, key : int, int and str, or None
        Partition, Flower's node id, and the fingerprint of the registered key; None where nobody knows it.
    verdicts : Counter
        How its requests ended.
    slots, rounds : set of int
        Of its accepted uploads.
    """

    client: int | None
    node: int | None
    key: str | None
    verdicts: Counter[str] = field(default_factory=Counter)
    slots: set[int] = field(default_factory=set)
    rounds: set[int] = field(default_factory=set)

    @property
    def rejected(self) -> int:
        """Number of its replies that were rejected or did not count."""
        return sum(n for verdict, n in self.verdicts.items() if verdict not in (ACCEPTED, LOST, NOT_NEEDED))


def devices(lines: Iterable[Mapping[str, Any]], slot: int | None = None) -> list[Device]:
    """Return the devices in `lines`, by client; with `slot`, only what happened with that slot's model."""
    found: dict[tuple[Any, Any, Any], Device] = {}
    for line in lines:
        if slot is not None and line.get("slot") != slot:
            continue
        who = line.get("client"), line.get("node"), line.get("key")
        device = found.setdefault(who, Device(*who))
        device.verdicts[str(line["verdict"])] += 1
        if line["verdict"] == ACCEPTED:
            device.slots |= {line["slot"]} if type(line.get("slot")) is int else set()
            device.rounds |= {line["round"]} if type(line.get("round")) is int else set()
    return sorted(found.values(), key=lambda one: tuple(-1 if x is None else x for x in (one.client, one.node)))


def doubt(found: Checked) -> str:
    """Return why devices that the trail does not name may have touched the model as well; "" if none can have."""
    if found.faults:
        return "the trail was changed"
    if found.after:
        return f"the trail begins after round {found.after}"
    return "" if found.anchor else "nothing says where the trail ends"


def table(found: Sequence[Device], doubted: str = "") -> str:
    """Return a table of devices, and what it says of the model; `doubted` is the answer of :func:`doubt`."""
    head = ("client", "node", "key", "accepted", "rejected", "lost", "rounds", "slots")
    rows = [head, *(_row(device) for device in found)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    text = ["  ".join(word.rjust(width) for word, width in zip(row, widths)) for row in rows]
    touched = [device for device in found if device.rounds]
    clients = {device.client for device in touched}
    others = {device.client for device in found if device.client is not None} - clients
    text.append("")
    others_too = "Nobody else has touched the model, that is certain. It is an upper bound: models"
    if doubted:
        others_too = f"Others may have touched the model as well: {doubted}. Models"
    text.append(
        f"{len(touched)} devices ({len(clients)} clients) had an upload accepted. {others_too} of a pool are mixed "
        "with each other, so all of these uploads count, also those whose weight in the final model has become small "
        "or, by the method's own rule, zero."
    )
    text.append(f"{len(others)} clients were asked, and nothing of theirs was accepted.")
    return "\n".join(text)


def _row(device: Device) -> tuple[str, ...]:
    verdicts = device.verdicts
    rounds = f"{min(device.rounds)}-{max(device.rounds)}" if device.rounds else "-"
    slots = sorted(device.slots)
    which = ",".join(map(str, slots[:8])) + (",..." if len(slots) > 8 else "") if slots else "-"
    counts = (verdicts[ACCEPTED], device.rejected, verdicts[LOST])
    who = ("-" if one is None else str(one) for one in (device.client, device.node, device.key))
    return (*who, *map(str, counts), rounds, which)


def report(found: Checked) -> str:
    """Return what the check of a chain found, for people."""
    if found.faults:
        more = [f"... and {len(found.faults) - SHOWN} more"] if len(found.faults) > SHOWN else []
        return "\n".join([f"{NAME} was changed:", *(f"  {fault}" for fault in found.faults[:SHOWN]), *more])
    text = f"{NAME}: {found.lines} lines, every one as it was written"
    if not found.anchor:
        return f"{text}. No checkpoint and no result says where it ends: lines missing there cannot be noticed."
    end = f"; the last {found.loose} lines are newer than that and have the chain alone" if found.loose else ""
    return f"{text}; the end agrees with {found.anchor}{end}."


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``fedcross audit``."""
    line = argparse.ArgumentParser(
        prog="fedcross audit",
        description="Check a run's audit trail; tell which devices trained its model. Needs a run with log.audit=true, "
        "which engine=superlink and engine=remote have by themselves.",
    )
    line.add_argument("folder", metavar="RUN", type=Path, help="the run's folder")
    line.add_argument("--devices", action="store_true", help="which devices had an upload accepted")
    line.add_argument("--slot", type=int, metavar="I", help="with --devices: only for the model of slot I of a pool")
    return line


def main(arguments: Sequence[str]) -> int:
    """Run ``fedcross audit``; return 1 if the chain does not hold."""
    asked = parser()
    options = asked.parse_args(arguments)
    if options.slot is not None and not options.devices:
        asked.error("--slot needs --devices")
    found = check(options.folder)
    print(report(found), file=sys.stderr if found.faults else sys.stdout)
    if options.devices:
        lines = lines_of(options.folder)
        slots = {line["slot"] for line in lines if type(line.get("slot")) is int}
        if options.slot is not None and options.slot not in slots:
            has = f"they are on slots {min(slots)} to {max(slots)}" if slots else "they are on none"
            print(f"--slot {options.slot}: no line of the trail is on this slot; {has}.", file=sys.stderr)
            return 1 if found.faults else 2
        print(table(devices(lines, options.slot), doubt(found)))
    return 1 if found.faults else 0
