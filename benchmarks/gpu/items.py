"""Runs the items one after the other, each in processes of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.gpu.report import Found, read, write

#: Item -> the most seconds that it may take on a GPU, three times as many as it should. In the order of their use: what
#: may not run at all comes before what may be slow.
ITEMS = {
    "smoke": 300,
    "accuracy": 120,
    "graphs": 180,
    "steps": 450,
    "convolutions": 150,
    "transfers": 90,
    "processes": 180,
    "trace": 60,
}
#: How many processes an item may have; each new one goes on after the line at which the one before ended.
PROCESSES = 6

Command = Callable[[str], Sequence[str]]


def run_all(names: Sequence[str], file: Path, command: Command, *, tiny: bool) -> Found:
    """Run the items `names` and return the report in `file`, which is begun anew.

    Parameters
    ----------
    names : sequence of str
        Items.
    file : Path
        The report.
    command : callable
        Item -> command line of a process that writes its lines.
    tiny : bool
        Whether only the program is tried: without limits of time, on a machine that may be busy.
    """
    write(file, {"tiny": tiny, "items": {}})
    for name in names:
        started = time.perf_counter()
        ended = _run(name, command(name), file, None if tiny else ITEMS[name])
        found = read(file)
        item = found["items"].setdefault(name, {"found": {}})
        item["seconds"] = round(time.perf_counter() - started, 2)
        if ended:
            item["ended"] = {"error": ended}
        write(file, found)
    return read(file)


def _run(name: str, command: Sequence[str], file: Path, limit: float | None) -> str:
    """Run `command`, again where it ends early; return how the last process ended, empty if by itself."""
    until = None if limit is None else time.monotonic() + limit
    code = written = 0
    for _ in range(PROCESSES):
        left = None if until is None else max(until - time.monotonic(), 1.0)
        process = subprocess.Popen(command, start_new_session=True, cwd=Path(__file__).parents[2])
        try:
            code = process.wait(left)
        except subprocess.TimeoutExpired:
            return f"stopped after {limit} seconds"
        finally:
            _end(process)
        if code == 0:
            return ""
        if written == (written := len(read(file)["items"].get(name, {}).get("found", {}))):
            break  # another one would end at the same place
    return f"the last process ended with code {code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process with all that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
