"""Measures what the live page, ``/metrics`` and the audit trail cost of a round, in one run that has them all.

::

    python -m benchmarks.observing           # LeNet-5 and digits, writes docs/performance.md
    python -m benchmarks.observing --dry

K = 10 clients one after another in one process and one thread. Beside the run, another process has the page open and a
third one asks for ``/metrics`` every five seconds, as Prometheus does. What counts is the processor time that each part
takes from the run's own thread, and that of the page's thread: with Python's lock the run may wait for all of it. The
page's thread works by the clock, not by rounds: its share of the time that passes is laid on a round that has the
processor to itself. Wall-clock time stands beside it; on a busy machine it holds other programs' work, and that of a
disk in the trail's one fsync of a round. Shares are of the same clock, in one run.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median

import torch

from benchmarks.common import Ours, machine, write_section
from benchmarks.overhead import REST, Spans, settings_of

AUDIT, EVENTS, THREAD = "audit trail", "events for the page", "the page's thread: page open, /metrics every 5 s"
#: Most of a LeNet-5 round, and most seconds of a digits round.
SHARE, SECONDS = 0.01, 0.002
READER = "import sys,urllib.request as r\nfor _ in r.urlopen(sys.argv[1]): pass"
SCRAPER = "import sys,time,urllib.request as r\nwhile True:\n r.urlopen(sys.argv[1]).read(); time.sleep(5)"


@contextmanager
def visitors(url: str) -> Iterator[None]:
    """Have a reader of the page's events and one of ``/metrics`` inside the block, as processes of their own."""
    commands = ((READER, f"{url}events"), (SCRAPER, f"{url}metrics"))
    started = [subprocess.Popen([sys.executable, "-S", "-c", code, place]) for code, place in commands]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


Times = dict[str, tuple[float, float]]


def measure(settings: list[str], rounds: int, pause: float) -> Times:
    """Return wall-clock and processor seconds of each part and of the whole round, medians of all rounds."""
    from fedcross.server.serving import page_of
    from fedcross.strategies.round import base, trail

    run, spans = Ours(settings, workers=1), Spans(time.thread_time)
    session = run.session
    assert session.audit is not None
    assert session.board is not None
    for owner, name, part in (
        (base, "digest_of", AUDIT), (trail, "digest_of", AUDIT), (session, "_note", AUDIT),
        (session.audit, "flush", AUDIT), (trail, "_accepted", AUDIT), (session, "_tell", EVENTS),
    ):  # fmt: skip
        spans.wrap(owner, name, part)
    session.method.on_ended, session.method.tell = session._note, session._tell
    session._tell_start()
    each: list[Times] = []
    try:
        with page_of(session.board, session.config, session.folder):
            thread = next(one for one in threading.enumerate() if one.name == "fedcross-page")
            assert thread.ident is not None
            clock = time.pthread_getcpuclockid(thread.ident)
            url = (session.folder / "page.url").read_text().strip()
            with visitors(url):
                time.sleep(pause)
                for _ in range(3):
                    run.round()
                spans.take()
                for _ in range(rounds):
                    before = time.clock_gettime(clock)
                    with spans.span(REST):
                        run.round()
                    each.append({**spans.take(), THREAD: (time.clock_gettime(clock) - before,) * 2})
    finally:
        run.close()
    whole = [tuple(sum(one[i] for name, one in times.items() if name != THREAD) for i in (0, 1)) for times in each]
    parts = {name: _typical([times.get(name, (0.0, 0.0)) for times in each], median) for name in (AUDIT, EVENTS)}
    # The thread works in bursts, less often than once a round of the digits: its mean.
    _, busy = _typical([times[THREAD] for times in each], fmean)
    passed, _ = _typical(whole, fmean)
    wall, cpu = _typical(whole, median)
    return {**parts, THREAD: (wall * busy / passed, cpu * busy / passed), "round": (wall, cpu)}


def _typical(found: Sequence[tuple[float, ...]], kind: Callable[[list[float]], float]) -> tuple[float, float]:
    return kind([one[0] for one in found]), kind([one[1] for one in found])


def case(name: str, rounds: int) -> tuple[str, bool]:
    """Return the table of a case, and whether it is within its limit."""
    with tempfile.TemporaryDirectory(prefix="fedcross-bench-") as place:
        folder = Path(place)
        os.environ["FEDCROSS_STATE"], os.environ["FEDCROSS_CACHE"] = str(folder / "state"), str(folder / "cache")
        parts = measure([*settings_of(name, folder), "serve.page=true"], rounds, pause=2.0)
    whole = parts.pop("round")
    total = (sum(wall for wall, _ in parts.values()), sum(cpu for _, cpu in parts.values()))
    lines = ["| part | processor, ms a round | share | wall clock, ms | share |", "|---|---|---|---|---|"]
    lines += [
        f"| {part} | {1e3 * cpu:.2f} | {cpu / whole[1]:.2%} | {1e3 * wall:.2f} | {wall / whole[0]:.2%} |"
        for part, (wall, cpu) in [*parts.items(), ("**all three**", total), ("round", whole)]
    ]
    good = total[1] <= (SHARE * whole[1] if name == "lenet5" else SECONDS)
    limit = f"{100 * SHARE:.0f} % of the round" if name == "lenet5" else f"{1e3 * SECONDS:.0f} ms"
    head = f"**{name}**, {rounds} rounds (limit {limit} of processor time: {'kept' if good else 'not kept'}):"
    return f"{head}\n\n" + "\n".join(lines), good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="print only, leave docs/performance.md as it is")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for name, rounds in (("digits", 100), ("lenet5", 5)):
        found.append(case(name, rounds))
        print(found[-1][0], flush=True)
    if not given.dry:
        load = f"Load of the machine meanwhile: {os.getloadavg()[1]:.0f} on {os.cpu_count()} cores."
        texts = ["## Page, metrics and audit trail", machine(), load, *(text for text, _ in found)]
        write_section("observing", "\n\n".join(texts))
    return int(not all(good for _, good in found))


if __name__ == "__main__":
    sys.exit(main())
