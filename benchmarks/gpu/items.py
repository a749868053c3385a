"""Runs the items one after the other, each in processes of its own, each line within a limit of time."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.gpu.expected import broken
from benchmarks.gpu.report import BEGUN, Found, lines, read, write

#: Item -> the most seconds that one of its lines may take on a GPU. In the order of their use: what may not run at all
#: comes before what may be slow, and the many methods are last.
ITEMS = {
    "smoke": 60,
    "accuracy": 60,
    "graphs": 120,
    "steps": 60,
    "convolutions": 30,
    "transfers": 60,
    "processes": 120,
    "trace": 60,
    "methods": 60,
}
#: What ``--tiny`` leaves out unless it is asked for: it tries the program.
LARGE = {"methods"}
#: The most seconds before a process has loaded torch and begun its first line.
START = 120.0
#: What all calls for one report have in common.
SAME = ("device", "machine", "torch", "tiny")
#: What all lines of an item have in common: code, driver, libraries and variables.
BY = ("commit", "sources", "environment")
#: How long, in seconds, an item's process may take to end.
_ENDING = 10.0
#: How often, in seconds, this process looks whether a line has begun or ended.
_LOOK = 0.2
#: The repository.
ROOT = Path(__file__).parents[2]

Command = Callable[[str], Sequence[str]]


def begin(names: Sequence[str], file: Path, about: Found, *, anew: bool) -> None:
    """Prepare the report in `file` for the items `names`: lines that were as expected stay, unless `anew`.

    An item of which other code, another driver or other variables gave the lines begins anew.

    Raises
    ------
    ValueError
        If the report is of another machine, device, size or version of torch than `about` says.
    """
    found = read(file)
    known, here = ({name: one[name] for name in SAME if name in one} for one in (found, about))
    if found and known != here:
        raise ValueError(f"{file} is a report of {known}, here is {here}; give another --output")
    empty: Found = {"items": {}}
    found = empty | found | about
    gpu = about.get("device", "cpu") != "cpu"
    by = {name: about[name] for name in BY if name in about}
    for name in names:
        kept, before = lines(found, name), found["items"][name]
        if kept and before.get("by", {}) != by:
            now, then = _flat(by), _flat(before.get("by", {}))
            other = [key for key in now | then if now.get(key) != then.get(key)]
            print(f"{name} begins anew, because these are others: {', '.join(other)}", flush=True)
            kept = {}
        kept = {line: value for line, value in kept.items() if not (anew or broken(name, line, value, gpu=gpu))}
        found["items"][name] = {"found": kept, "seconds": before.get("seconds", 0.0), "by": by}
    write(file, found)


def _flat(by: Found) -> Found:
    """Return the entries of `by`, those of its environment among them."""
    environment: Found = by.get("environment", {})
    return {name: value for name, value in by.items() if name != "environment"} | environment


def run_all(names: Sequence[str], file: Path, command: Command, *, tiny: bool, seconds: float = math.inf) -> Found:
    """Run the items `names` and return the report in `file`.

    Parameters
    ----------
    names : sequence of str
        Items.
    file : Path
        The report. Lines that it has already are not measured again. What the processes say goes to the terminal, and
        to a file beside it (``.log``).
    command : callable
        Item -> command line of a process that writes its lines.
    tiny : bool
        Whether only the program is tried, on a CPU that may be busy: lines have no limits of time.
    seconds : float
        For everything. What is not measured then, or after SIGINT or SIGTERM, is a fault of its item.
    """
    until, stopped = time.monotonic() + seconds, ""
    for name in names:
        started = time.monotonic()
        if not stopped and started >= until:
            stopped = f"the {seconds:g} seconds were over"
        ended = f"not begun: {stopped}"
        if not stopped:
            try:
                ended = _run(name, command(name), file, math.inf if tiny else ITEMS[name], until)
            except KeyboardInterrupt:
                ended = stopped = "interrupted"
        found = read(file)
        lines(found, name)
        item = found["items"][name]
        item["seconds"] = round(item.get("seconds", 0.0) + time.monotonic() - started, 2)
        if ended:
            item["ended"] = {"error": ended}
        write(file, found)
    return read(file)


def _run(name: str, command: Sequence[str], file: Path, limit: float, until: float) -> str:
    """Run `command`, again where it ends early; return why the item is not complete, empty if it is."""
    while True:
        before = len(lines(read(file), name))
        with _started(command, file.with_suffix(".log")) as process:
            why = _watch(process, file, limit, until)
        code = process.poll()
        written = _mark(name, file, why or f"{BEGUN} (exit code {code})")
        if not why and code == 0:
            return ""
        if time.monotonic() >= until:
            return "not complete: the time for all items was over"
        if written == before:  # another process would end at the same place
            return why or f"the last process ended with code {code}"


def _watch(process: subprocess.Popen[str], file: Path, limit: float, until: float) -> str:
    """Wait for `process`; return why it has to be ended, empty if it ended by itself."""
    seen, since, most = _written(file), time.monotonic(), max(START, limit)
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK)
            return ""
        now = time.monotonic()
        if seen != (seen := _written(file)):
            since, most = now, limit
        if now >= until:
            return "not finished: the time for all items was over"
        if now >= since + most:
            return f"stopped after {most:g} seconds; the log says where"


def _written(file: Path) -> int:
    return file.stat().st_mtime_ns if file.exists() else 0


def _mark(name: str, file: Path, why: str) -> int:
    """Say of a line that has begun and not ended `why`; return the number of lines."""
    found = read(file)
    own = lines(found, name)
    for line, value in own.items():
        if value == {"error": BEGUN}:
            own[line] = {"error": why}
            print(f"{name}: {line}: {why}", flush=True)
            write(file, found)
    return len(own)


@contextmanager
def _started(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process, copy what it says to the terminal and to `log`, and end it afterwards with all it started."""
    log.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        command,
        start_new_session=True,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )

    def copy() -> None:
        assert process.stdout is not None
        with process.stdout, log.open("a") as kept:
            for row in process.stdout:
                kept.write(row)
                kept.flush()
                sys.stdout.write(row)
                sys.stdout.flush()

    copying = threading.Thread(target=copy, daemon=True)
    copying.start()
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # one that hangs in the driver does not end; nobody waits for it
            process.wait(_ENDING)
        copying.join(5.0)
