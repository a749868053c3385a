"""What all benchmarks share: workloads, runs of fedcross, blocks in turns, and tables."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class Workload:
    """A round: `drawn` of `clients` clients, `examples` images of 3x32x32 each, `epochs` epochs in batches."""

    model: str = "lenet5"
    clients: int = 100
    examples: int = 500
    drawn: int = 10
    epochs: int = 5
    batch: int = 50
    lr: float = 0.01
    momentum: float = 0.5

    def settings(self, folder: Path, *more: str) -> list[str]:
        """Return the settings of a fedcross run on the images in `folder`."""
        return [
            *("task=arrays", f"task.root={folder}", "task.classes=10", f"model={self.model}", "method=fedavg"),
            *("partition=iid", f"partition.clients={self.clients}", f"clients_per_round={self.drawn}"),
            *(f"train.epochs={self.epochs}", f"train.batch={self.batch}", f"train.lr={self.lr}"),
            *(f"train.momentum={self.momentum}", "logger=none", "device=cpu", *more),
        ]


def images(work: Workload, folder: Path) -> Path:
    """Write random images and labels of all clients as ``data.npz`` into `folder`; return the file."""
    draw = np.random.default_rng(0)
    n = work.clients * work.examples
    x, x_test = (draw.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8) for count in (n, 200))
    y, y_test = (draw.integers(0, 10, count) for count in (n, 200))
    np.savez(folder / "data.npz", x=x, y=y, x_test=x_test, y_test=y_test)
    return folder / "data.npz"


@contextlib.contextmanager
def scratch(work: Workload) -> Iterator[Path]:
    """Give a temporary folder with the images of `work`, where caches and states go too."""
    with tempfile.TemporaryDirectory(prefix="fedcross-bench-") as name:
        folder = Path(name)
        before = dict(os.environ)
        os.environ |= {"FEDCROSS_STATE": str(folder / "state"), "FEDCROSS_CACHE": str(folder / "cache")}
        try:
            images(work, folder)
            yield folder
        finally:
            os.environ.clear()
            os.environ.update(before)


def fedcross_rounds(settings: Sequence[str], rounds: int) -> pd.DataFrame:
    """Run `rounds` rounds of `settings` in a folder of their own and return their metrics.

    ``seconds`` are those from the end of one round to the end of the next, with its checkpoint and records.

    Raises
    ------
    RuntimeError
        If a round lost a client.
    """
    import fedcross

    events = io.StringIO()
    with (
        tempfile.TemporaryDirectory(prefix="fedcross-bench-run-") as name,
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(events),
    ):
        metrics = fedcross.run(*settings, f"rounds={rounds}", "log.format=json", f"output={name}/run").metrics
    if metrics["dropped"].any():
        raise RuntimeError(f"{metrics['dropped'].sum()} clients were lost")
    told = [json.loads(line) for line in events.getvalue().splitlines() if line.startswith("{")]
    ends = [datetime.fromisoformat(one["time"]) for one in told if one["event"] in ("run_started", "round_finished")]
    return metrics.assign(seconds=[(b - a).total_seconds() for a, b in itertools.pairwise(ends)])


def second_round(*settings: str) -> Callable[[], float]:
    """Return a call that runs fedcross for two rounds and returns the seconds of the second one."""
    return lambda: float(fedcross_rounds(settings, 2)["seconds"].iloc[1])


def in_turns(contestants: Mapping[str, Callable[[], float]], turns: int, reference: str) -> pd.DataFrame:
    """Call every contestant `turns` times, one after the other, and return seconds a round and ratios.

    Ratios are medians over the turns, so all contestants share the load of the machine. A contestant that raises a
    RuntimeError gets a row with the reason.
    """
    found: dict[str, list[float]] = {name: [] for name in contestants}
    reasons: dict[str, str] = {}
    for _ in range(turns):
        for name in [one for one in contestants if one not in reasons]:
            try:
                found[name].append(contestants[name]())
                print(f"  {name}: {found[name][-1]:.3f} s", file=sys.stderr, flush=True)
            except RuntimeError as error:
                reasons[name] = str(error)
    rows: list[dict[str, Any]] = [{"contestant": f"{name}: {reason}"} for name, reason in reasons.items()]
    for name, times in found.items():
        if name not in reasons:
            row = {"contestant": name, "s/round": median(times), "spread": f"{min(times):.3g} to {max(times):.3g}"}
            rows.append(row | {"ratio": median(np.divide(times, found[reference]).tolist())})
    return pd.DataFrame(rows)


def child(code: str, *arguments: object) -> dict[str, Any]:
    """Run `code` in a new process, which prints JSON on its last line; return that with the peak memory in MiB.

    Raises
    ------
    RuntimeError
        If the process fails.
    """
    tail = "\nimport resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    command = [sys.executable, "-c", code + tail, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    *_, found, peak = done.stdout.strip().splitlines()
    return {**json.loads(found), "peak MiB": float(peak)}


def machine() -> str:
    """Return one line about machine, versions and time."""
    import torch

    return (
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}; "
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC."
    )


def markdown(table: pd.DataFrame) -> str:
    """Return `table` as Markdown, numbers with three digits."""
    text = table.map(lambda cell: "" if pd.isna(cell) else f"{cell:.3g}" if isinstance(cell, float) else str(cell))
    rows = [list(map(str, table.columns)), ["---"] * table.shape[1], *text.to_numpy().tolist()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
