"""``python -m benchmarks QUESTION...``: measures and prints the tables."""

from __future__ import annotations

import argparse
import os
import time
from importlib import import_module
from pathlib import Path

from benchmarks.harness import machine, markdown

QUESTIONS = {
    "engine": "a round of local training: fedcross against a textbook loop",
    "peers": "a round of FedAvg: fedcross against other frameworks",
    "aggregation": "FedCross's aggregation on the server against a plain loop",
    "wire": "what a round costs besides training, on every engine",
    "scaling": "time and memory by clients, clients drawn and model; a check for leaks",
}
"""Question -> what it measures; each is a module with ``measure(quick)``, a frame. ``benchmarks.gpu`` runs alone."""


def foreign() -> float:
    """Return the CPU seconds that other programs have used, besides this one and those it has ended."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - sum(os.times()[:4])


def main() -> None:
    """Measure what the command line asks for."""
    described = "; ".join(f"{name}: {text}" for name, text in QUESTIONS.items())
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, epilog=described)
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help="default: all")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, seconds instead of minutes")
    given = parser.parse_args()
    if unknown := set(given.questions) - set(QUESTIONS):
        parser.error(f"{min(unknown)}: no such question; there are {', '.join(QUESTIONS)}")
    for name in given.questions or QUESTIONS:
        start, before = time.monotonic(), foreign()
        table = markdown(import_module(f"benchmarks.{name}").measure(given.quick))
        share = (foreign() - before) / (time.monotonic() - start) / (os.cpu_count() or 1)
        print(f"`python -m benchmarks {name}`: {QUESTIONS[name]}. {machine()} Other programs: {share:.0%} of the CPUs.")
        print(f"\n{table}\n", flush=True)


if __name__ == "__main__":
    main()
