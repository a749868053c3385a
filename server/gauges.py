"""The numbers of a run in Prometheus' text format, collected when somebody asks for them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fedcross.server.board import Board

#: Name in the board's totals -> name of the counter, and what it counts.
COUNTERS = {
    "requests": ("requests", "Requests sent to clients"),
    "resends": ("resends", "Requests that were sent again to the same client"),
    "clients": ("visits", "Visits of clients in finished rounds"),
    "dropped": ("slots_lost", "Slots without an upload that counts"),
    "clipped": ("clipped", "Uploads that the defence scaled down"),
    "spares": ("spares", "Requests to spare clients"),
}


class RunCollector(Collector):
    """Collects the metrics of the run that `board` shows and whose files lie in `folder`."""

    def __init__(self, board: Board, folder: Path) -> None:
        self._board, self._folder = board, folder

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        now = self._board.snapshot()
        last, totals = now["last"], now["totals"]
        yield named(now["run"])
        yield GaugeMetricFamily("fedcross_round", "Last round that has begun", now["round"])
        yield GaugeMetricFamily("fedcross_rounds_planned", "Planned rounds", now["run"].get("rounds", 0))
        yield GaugeMetricFamily("fedcross_up", "1 while rounds are run", now["state"] == "running")
        yield CounterMetricFamily("fedcross_rounds", "Rounds finished by this process", len_of(now))
        for name, (counter, text) in COUNTERS.items():
            yield CounterMetricFamily(f"fedcross_{counter}", text, totals.get(name, 0))
        sent = CounterMetricFamily("fedcross_bytes", "Bytes of array values", labels=["direction"])
        for way in ("down", "up"):
            sent.add_metric([way], totals.get(f"bytes_{way}", 0))
        yield sent
        rejected = CounterMetricFamily("fedcross_replies_rejected", "Rejected replies", labels=["reason"])
        for reason, count in now["rejected"].items():
            rejected.add_metric([reason], count)
        yield rejected
        phases = CounterMetricFamily("fedcross_seconds", "Seconds of this process", labels=["phase"])
        for phase, seconds in {**self._board.phases, "round": totals.get("seconds", 0)}.items():
            phases.add_metric([phase], seconds)
        yield phases
        yield GaugeMetricFamily("fedcross_devices_online", "Clients that are connected", now["online"] or 0)
        yield GaugeMetricFamily("fedcross_disk_free_bytes", "Free in the run's folder", self._free())
        yield GaugeMetricFamily("fedcross_memory_bytes", "Resident memory of the server's process", resident())
        if now["checkpoint"] is not None:
            age = time.time() - now["checkpoint"]
            yield GaugeMetricFamily("fedcross_checkpoint_age_seconds", "Since the newest checkpoint", age)
        if now["curve"]:
            yield GaugeMetricFamily("fedcross_test_accuracy", "Last evaluation, 0 to 1", now["curve"][-1]["accuracy"])
        if last.get("pool_similarity_mean") is not None:
            similarity = last["pool_similarity_mean"]
            yield GaugeMetricFamily("fedcross_pool_similarity", "Mean cosine of the pool's models", similarity)

    def _free(self) -> int:
        try:
            return shutil.disk_usage(self._folder).free
        except OSError:
            return 0


def named(run: dict[str, object]) -> Metric:
    """Return the gauge whose labels say which run this is; without a sample before the run has begun."""
    labels = ("run", "method", "task", "seed")
    told = GaugeMetricFamily("fedcross_run_info", "1; the labels name the run", labels=labels)
    if run:
        told.add_metric([str(run.get(label, "")) for label in labels], 1)
    return told


def len_of(snapshot: dict[str, object]) -> int:
    """Return how many rounds this process has finished."""
    last, run = snapshot["last"], snapshot["run"]
    if not isinstance(last, dict) or not isinstance(run, dict):
        raise TypeError("not a snapshot of a board")
    return int(last["round"]) - int(run["after_round"]) if last else 0


def resident() -> int:
    """Return the resident memory of this process in bytes; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
