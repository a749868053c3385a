"""Tells what ended a ServerApp that did not say it: whether the system killed it for memory (Linux, cgroup v2)."""

from __future__ import annotations

import re
from pathlib import Path

#: Where the control group of this process is described, and the counters of the group below it.
GROUP, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def kills() -> int:
    """Return how many processes of this control group were killed for lack of memory so far; 0 where nobody counts."""
    try:
        own = next(line[3:] for line in GROUP.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return 0
    for folder in (ROOT / own.lstrip("/"), ROOT):
        try:
            found = re.search(r"^oom_kill (\d+)$", (folder / "memory.events").read_text(), re.MULTILINE)
        except OSError:
            continue
        if found:
            return int(found[1])
    return 0


def end_of(details: str, before: int) -> str:
    """Return in one sentence what ended a ServerApp whose run failed with `details`; empty if it raised an error.

    `before` is what :func:`kills` returned when the run began. A ServerApp that raises an error reports it itself.
    """
    if killed := kills() - before:
        return f"The system killed {killed} processes of this run for lack of memory (out of memory)."
    if "heartbeat" in details.lower() or "unknown error" in details.lower():  # the second after a signal
        return "The ServerApp's process ended, or its SuperLink or SuperExec was away for longer than a minute."
    return ""
