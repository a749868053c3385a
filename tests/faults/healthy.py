"""A long run in which nothing is wrong, and every alarm in what it says: there must be none.

::

    python -m tests.faults.healthy                          # 1,000 rounds of the digits on this machine
    python -m tests.faults.healthy --rounds 100 engine=superlink partition.clients=3 clients_per_round=3

The run has the structured log, the audit trail and the live page. An alarm is a cause of the table in any of its lines,
a reply rejected or a slot lost, a warning or an error; at the end the trail is checked, and ``/metrics`` is read.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from pathlib import Path

from fedcross.core.causes import cause_of
from tests.support.injection import PATIENCE_S, Bench, Watched, wait_until
from tests.support.network import lines

#: Events that are alarms, and levels of others that are.
ALARMS, LEVELS = ("reply_rejected", "slot_lost", "run_failed", "run_interrupted"), ("WARNING", "ERROR", "CRITICAL")
SETTINGS = ("task=digits", "logger=none", "log.format=json", "log.audit=true", "serve.page=true", "method=fedcross")


def alarms(said: list[str]) -> list[str]:
    """Return those lines of a run's structured log that are alarms."""
    found = []
    for line in said:
        try:
            event = json.loads(line)
        except ValueError:
            event = {}
        loud = event.get("event") in ALARMS or event.get("level") in LEVELS
        if loud or cause_of(line) is not None:
            found.append(line)
    return found


def metrics(process: Watched, output: Path, rounds: int) -> dict[str, float]:
    """Return the run's counters as ``/metrics`` tells them when at least a tenth of its rounds is done."""
    wait_until(lambda: len(lines(output)) >= rounds // 10 or process.process.poll() is not None, PATIENCE_S)
    address = (output / "page.url").read_text().strip()
    with urllib.request.urlopen(f"{address}metrics", timeout=30) as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")}


def main() -> int:
    """Print what was seen; return 1 if there was an alarm or the run failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedcross-healthy-") as place, Bench(Path(place) / "bench") as bench:
        output, began = bench.folder / "run", time.monotonic()
        process = bench.fedcross(*SETTINGS, *asked.settings, f"rounds={asked.rounds}", f"output={output}")
        counted = metrics(process, output, asked.rounds)
        code = process.process.wait()
        process.end()
        took = time.monotonic() - began
        said = [line for _, line in process.said]
        wrong = alarms(said)
        done = lines(output)
        trail = bench.fedcross("audit", str(output))
        checked = trail.process.wait(PATIENCE_S)
        events = Counter(json.loads(line).get("event") for line in said if line.startswith("{"))
        lost = sum(line["dropped"] for line in done)
        counters = [name for name, value in counted.items() if value and ("rejected" in name or "lost" in name)]
    print(f"{len(done)} rounds in {took:.0f} s (load {os.getloadavg()[1]:.0f}), exit code {code}, {len(said)} lines")
    print(f"events: {dict(events)}")
    print(f"alarms: {len(wrong)}; slots lost: {lost}; counters of faults: {counters}; audit trail: exit code {checked}")
    print("\n".join(wrong[:10]))
    return int(bool(wrong or code or checked or counters or lost or len(done) != asked.rounds))


if __name__ == "__main__":
    sys.exit(main())
