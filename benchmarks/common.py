"""Shared code of the engine benchmarks: workloads, a fedcross run without its command line, and meters."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

_TICKS = os.sysconf("SC_CLK_TCK")
Cell = dict[str, float]


@dataclass(frozen=True)
class Workload:
    """A round: `drawn` of `clients` clients, `examples` images of 3x32x32 each, `epochs` epochs in batches of 50."""

    name: str
    model: str
    clients: int = 100
    examples: int = 500
    drawn: int = 10
    epochs: int = 5
    batch: int = 50
    lr: float = 0.01
    momentum: float = 0.5


WORKLOADS = {"w": Workload("w", "cnn_w"), "lenet5": Workload("lenet5", "lenet5")}


def images(work: Workload, folder: Path) -> Path:
    """Write random images and labels of all clients as ``data.npz`` into `folder`; return the file."""
    generator = np.random.default_rng(0)
    n = work.clients * work.examples
    file = folder / "data.npz"
    np.savez(
        file,
        x=generator.integers(0, 256, (n, 3, 32, 32), dtype=np.uint8),
        y=generator.integers(0, 10, n),
        x_test=generator.integers(0, 256, (200, 3, 32, 32), dtype=np.uint8),
        y_test=generator.integers(0, 10, 200),
    )
    return file


def overrides(work: Workload, folder: Path, output: Path, *more: str) -> list[str]:
    """Return the configuration of the fedcross run of `work` on the images in `folder`."""
    return [
        *("task=arrays", f"task.root={folder}", "task.classes=10", f"model={work.model}", "method=fedavg"),
        *("partition=iid", f"partition.clients={work.clients}", f"clients_per_round={work.drawn}"),
        *(f"train.epochs={work.epochs}", f"train.batch={work.batch}", f"train.lr={work.lr}"),
        *(f"train.momentum={work.momentum}", "logger=none", "device=cpu", "rounds=100000", f"output={output}"),
        "defence.enabled=false",  # other frameworks write none
        *more,
    ]


class Quiet:
    """A progress display that shows nothing."""

    def start(self, title: str, done: int, total: int) -> None:
        """Show nothing."""

    def round(self, entry: Any) -> None:
        """Show nothing."""

    def stop(self) -> None:
        """Show nothing."""


class Ours:
    """A fedcross run whose rounds are called one by one, with the real grid, guard and aggregation."""

    def __init__(self, settled: Sequence[str], workers: int) -> None:
        from fedcross.client.app import app, warm_for
        from fedcross.conf.compose import join
        from fedcross.conf.schema import load
        from fedcross.engines.grid import LocalGrid
        from fedcross.engines.workers import WorkersGrid
        from fedcross.server.session import Session

        text, config = join(settled), load(settled)
        clients = int(config.partition.clients)  # type: ignore[attr-defined]
        self.grid: LocalGrid
        if workers == 1:
            self.grid = LocalGrid(app, clients, {"overrides": text})
        else:
            fork, sizes = warm_for(text)()
            self.grid = WorkersGrid(app, clients, {"overrides": text}, workers, sizes=sizes, fork=fork)
        self.session = Session(config, self.grid, Quiet())
        self.number = 0

    @property
    def pids(self) -> list[int]:
        """Return the processes that work for this run."""
        pool = getattr(self.grid, "_pool", [])
        return [os.getpid(), *(worker.process.pid for worker in pool)]

    def round(self) -> dict[str, Any]:
        """Run the next round, with metrics and checkpoint, and return its line of metrics."""
        self.number += 1
        entry: dict[str, Any] = self.session._round(self.number)
        session = self.session
        if session.audit is not None:
            session.audit.flush()
        session.checkpoints.save(self.number, session.method.checkpoint(), session._identity())
        if entry["dropped"]:
            raise RuntimeError(f"A benchmark round lost {entry['dropped']} clients: {entry['rejected']}.")
        return entry

    def close(self) -> None:
        """End the workers."""
        self.grid.close()


def cpu(pids: Sequence[int]) -> float:
    """Return the CPU seconds that processes have used so far."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += int(fields[11]) + int(fields[12])
    return total / _TICKS


def machine_cpu() -> float:
    """Return the CPU seconds that all processes on this machine have used."""
    fields = [int(value) for value in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields) - fields[3] - fields[4]) / _TICKS


@contextmanager
def metered(pids: Sequence[int]) -> Iterator[Cell]:
    """Fill a cell with wall-clock seconds, own CPU seconds, and the share of all cores that other processes used."""
    cell: Cell = {}
    start, own, all_ = time.perf_counter(), cpu(pids), machine_cpu()
    yield cell
    cell["wall"] = time.perf_counter() - start
    cell["cpu"] = cpu(pids) - own
    cell["foreign"] = max(0.0, (machine_cpu() - all_ - cell["cpu"]) / cell["wall"] / (os.cpu_count() or 1))


def interleaved(runners: dict[str, Callable[[], Cell]], repeats: int) -> dict[str, list[Cell]]:
    """Run all `runners` once to warm up, then in turn `repeats` times."""
    cells: dict[str, list[Cell]] = {name: [] for name in runners}
    for turn in range(repeats + 1):
        for name, run in runners.items():
            cell = run()
            print(
                f"  {name}: wall {cell['wall']:.2f} s, cpu {cell['cpu']:.2f} s, others {cell['foreign']:.0%}",
                flush=True,
            )
            if turn:
                cells[name].append(cell)
    return cells


def table(cells: dict[str, list[Cell]], reference: str, notes: dict[str, str] | None = None) -> str:
    """Return medians and ratios to `reference` (median of the turns' ratios) as Markdown."""
    lines = [
        "| who | seconds a round | spread | ratio | CPU seconds | CPU ratio | others' CPU |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, own in cells.items():
        walls = [c["wall"] for c in own]
        ratio = median(c["wall"] / r["wall"] for c, r in zip(own, cells[reference]))
        cpu_ratio = median(c["cpu"] / r["cpu"] for c, r in zip(own, cells[reference]))
        lines.append(
            f"| {name} | {median(walls):.2f} | {min(walls):.2f} to {max(walls):.2f} | {ratio:.2f} "
            f"| {median(c['cpu'] for c in own):.2f} | {cpu_ratio:.2f} | {median(c['foreign'] for c in own):.0%} |"
        )
    lines += [f"| {name} | {reason} | | | | | |" for name, reason in (notes or {}).items()]
    return "\n".join(lines)


def machine() -> str:
    """Return one line about machine, versions and time."""
    import torch

    from fedcross.core.machine import processor

    return (
        f"Machine: {os.cpu_count()} cores, {processor()}; Python {platform.python_version()}, "
        f"torch {torch.__version__}, numpy {np.__version__}; {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."
    )


DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "performance.md"


def write_section(name: str, text: str, document: Path = DOCUMENT) -> None:
    """Put `text` between the marks of section `name` of the document, at its end if it is new."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    block = f"{begin}\n{text.strip()}\n{end}"
    page = document.read_text(encoding="utf-8") if document.exists() else "# Performance\n"
    if begin in page and end in page:
        page = page[: page.index(begin)] + block + page[page.index(end) + len(end) :]
    else:
        page = page.rstrip() + "\n\n" + block + "\n"
    document.write_text(page, encoding="utf-8")
