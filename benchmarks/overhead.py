"""Divides the time of a round into its parts, and measures how much of it is not training.

::

    python -m benchmarks.overhead           # LeNet-5 and digits, writes docs/performance.md
    python -m benchmarks.overhead --visits  # 1,000 visits of LeNet-5 with fedcross_async on the virtual clock
    python -m benchmarks.overhead --dry

One process, one thread, so that nothing overlaps: K = 10 clients one after another. The time of a part
excludes the parts that it calls. CPU time stands beside wall-clock time, because the machine may be busy.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.common import WORKLOADS, Ours, images, machine, overrides, write_section

TRAINING = "training: forward, backward, step"
REST = "messages, sampling, record"
LIMITS = {"lenet5": "3 % of the round", "visits": "3 % of the round", "digits": "15 ms"}
Times = dict[str, tuple[float, float]]


class Spans:
    """Exclusive wall-clock and CPU seconds of named parts; `clock` is that of the CPU, of the process or a thread."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self._clock = clock
        self._open: list[list[float]] = []
        self.own: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Time a part; subtract the parts inside it."""
        started = (time.perf_counter(), self._clock())
        self._open.append([0.0, 0.0])
        try:
            yield
        finally:
            spent = (time.perf_counter() - started[0], self._clock() - started[1])
            inside = self._open.pop()
            for i in (0, 1):
                self.own[name][i] += spent[i] - inside[i]
                if self._open:
                    self._open[-1][i] += spent[i]

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Time every call of ``owner.attribute`` from now on."""
        function: Callable[..., Any] = getattr(owner, attribute)

        def timed(*arguments: Any, **named: Any) -> Any:
            with self.span(name):
                return function(*arguments, **named)

        setattr(owner, attribute, timed)

    def take(self) -> Times:
        """Return the times measured since the last call."""
        taken = {name: (wall, cpu) for name, (wall, cpu) in self.own.items()}
        self.own.clear()
        return taken


def measure(settings: list[str], rounds: int) -> tuple[Times, Times]:
    """Return the median of each part over `rounds` rounds, and of the whole round and what of it is not training."""
    from fedcross.client import workshop as work
    from fedcross.strategies.round import base, guard, trail

    spans = Spans()
    run = Ours(settings, workers=1)
    spans.wrap(work, "train", TRAINING)
    spans.wrap(work.Workshop, "train", "client: load, prepare, pack")
    spans.wrap(guard, "check", "guard")
    spans.wrap(run.session.method, "aggregate", "aggregation")
    spans.wrap(run.session.checkpoints, "save", "checkpoint")
    for owner, name in (
        (base, "digest_of"),
        (trail, "digest_of"),
        (run.session, "_note"),
        (run.session.audit, "flush"),
    ):
        spans.wrap(owner, name, "audit trail")
    run.session.method.on_ended = run.session._note
    try:
        for _ in range(3):
            run.round()
        spans.take()
        each: list[Times] = []
        for _ in range(rounds):
            with spans.span(REST):
                run.round()
            each.append(spans.take())
    finally:
        run.close()

    def typical(value: Callable[[Times], tuple[float, float]]) -> tuple[float, float]:
        found = [value(times) for times in each]
        return median(wall for wall, _ in found), median(cpu for _, cpu in found)

    def total(times: Times, without: str = "") -> tuple[float, float]:
        kept = [spent for name, spent in times.items() if name != without]
        return sum(wall for wall, _ in kept), sum(cpu for _, cpu in kept)

    parts = {name: typical(lambda times, name=name: times[name]) for name in each[0]}  # type: ignore[misc]
    return parts, {"round": typical(total), "not training": typical(lambda times: total(times, TRAINING))}


#: With the audit trail, as a run over a network has it.
AUDITED = ("method=fedcross", "log.audit=true")
VISITS = ("method=fedcross_async", "clock=virtual", "devices=uniform", "log.audit=true")


def settings_of(name: str, folder: Path) -> list[str]:
    """Return the configuration of a case."""
    if name in ("lenet5", "visits"):
        images(WORKLOADS["lenet5"], folder)
        own = AUDITED if name == "lenet5" else VISITS
        return overrides(WORKLOADS["lenet5"], folder, folder / "run", *own, "evaluate_every=1000000")
    common = ["logger=none", "device=cpu", "rounds=100000", "evaluate_every=1000000", "defence.enabled=false"]
    return ["task=digits", *AUDITED, *common, f"output={folder / 'run'}"]


def case(name: str, rounds: int) -> str:
    """Return the table of a case."""
    with tempfile.TemporaryDirectory(prefix="fedcross-bench-") as place:
        folder = Path(place)
        os.environ["FEDCROSS_STATE"], os.environ["FEDCROSS_CACHE"] = str(folder / "state"), str(folder / "cache")
        parts, sums = measure(settings_of(name, folder), rounds)
    lines = ["| part | wall, ms | CPU, ms | share of the round |", "|---|---|---|---|"]
    whole = sums["round"][0]
    rows = sorted(parts.items(), key=lambda part: -part[1][0]) + [(f"**{n}**", spent) for n, spent in sums.items()]
    lines += [f"| {n} | {1e3 * wall:.1f} | {1e3 * cpu:.1f} | {100 * wall / whole:.1f} % |" for n, (wall, cpu) in rows]
    return f"**{name}**, medians of {rounds} rounds (limit of what is not training: {LIMITS[name]}):\n\n" + "\n".join(
        lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="print only, leave docs/performance.md as it is")
    parser.add_argument("--visits", action="store_true", help="measure the asynchronous loop, 100 rounds of 10 visits")
    given = parser.parse_args()
    torch.set_num_threads(1)
    texts = []
    for name, rounds in (("visits", 100),) if given.visits else (("digits", 100), ("lenet5", 5)):
        texts.append(case(name, rounds))
        print(texts[-1], flush=True)
    if not given.dry:
        loop = ("loop", "## The asynchronous loop")
        section, head = loop if given.visits else ("overhead", "## What is not training")
        write_section(section, "\n\n".join([head, machine(), *texts]))


if __name__ == "__main__":
    main()
