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
    """Return in one sentence what ended a ServerApp whose run failed with `details`; empty if that says it.

    `before` is what :func:`kills` returned when the run began.

    A ServerApp that raises an error reports it itself. If the SuperLink just heard no more of its process, either
    something killed the process, or the SuperLink's database was busy for so long that no sign of life got through.
    Only the counter tells that memory ran out, and it counts processes of this command's control group alone.
    """
    if killed := kills() - before:
        return f"The system killed {killed} processes of this run for lack of memory (out of memory)."
    if "heartbeat" in details.lower():
        return (
            "The SuperLink took the ServerApp's process for lost: no sign of life in time (a minute, once it runs). "
            "Either the process was killed (memory.events of its container, or dmesg, says if it was for memory), or "
            "the SuperLink was away for too long, or too busy to hear it (its log: database is locked). "
            "fedcross resume= goes on."
        )
    if "unknown error" in details.lower():  # Flower says so of a ServerApp that a signal ended
        return (
            "The ServerApp's process was ended by a signal, as when its SuperExec is stopped, whatever the log says of "
            "a user. fedcross resume= goes on, as soon as a SuperExec is there."
        )
    return ""
