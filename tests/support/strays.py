"""Finds the processes that a test started and left behind, also those whose parent has ended (Linux)."""

from __future__ import annotations

import os
import time
from pathlib import Path

#: The helpers of Python's and torch's multiprocessing. They live until the process that needed them ends.
_HELPERS = ("multiprocessing.resource_tracker", "torch_shm_manager")


def left_behind(variable: str, patience_s: float = 0) -> list[str]:
    """Return the command lines of other processes with `variable` (``NAME=value``) in their environment.

    Parameters
    ----------
    variable : str
        What the processes inherited.
    patience_s : float
        Seconds that they may take to end.
    """
    deadline = time.monotonic() + patience_s
    while (found := _with(variable.encode())) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _with(variable: bytes) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        if int(entry.name) != os.getpid():
            try:
                if variable in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:
                continue  # ended meanwhile
    return [command for command in found if not any(name in command for name in _HELPERS)]
