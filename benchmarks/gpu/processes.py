"""Milliseconds of a LeNet-5 step in 1, 4 and 10 processes that share the device, all at the same time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import partial

from benchmarks.gpu.place import Place, stepper
from benchmarks.gpu.report import Lines


def measure(place: Place, line: Lines) -> None:
    """Write a line for each number of processes."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", str(place.device), "--worker"]
    command += ["--tiny"] if place.tiny else []
    for count in (1,) if place.tiny else (1, 4, 10):
        line(str(count), partial(_times, command, count))


def _times(command: Sequence[str], count: int) -> list[float]:
    return [float(words[-1]) for words in at_once([command] * count)]


def at_once(commands: Sequence[Sequence[str]]) -> list[list[str]]:
    """Start all `commands`, let them go on once each has said that it is ready, and return the words they print then.

    Raises
    ------
    RuntimeError
        If one of them ends before it is ready, or says nothing afterwards.
    """
    pipe = subprocess.PIPE
    running = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for command in commands]
    try:
        for one in running:
            assert one.stdout is not None
            while (said := one.stdout.readline()).strip() != "ready":
                if not said:
                    raise RuntimeError(f"a process ended with code {one.wait()} before it was ready")
        for one in running:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        words = [one.communicate()[0].split() for one in running]
    finally:
        for one in running:
            one.kill()
            one.communicate()
    if not all(words):
        raise RuntimeError(f"processes ended with codes {[one.returncode for one in running]}")
    return words


def work(place: Place) -> None:
    """Measure steps in this process, once all processes are ready."""
    one = stepper(place, "lenet5")
    one()  # libraries start at the first call
    place.wait()
    print("ready", flush=True)
    sys.stdin.readline()
    print(place.ms(one, 200), flush=True)
