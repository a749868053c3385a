"""Start-up time of a task's data, and the memory of many processes that read it at once.

    python -m benchmarks.data --task cifar10 --root DIR --clients 10

Every client is a process that maps the cached task and reads every byte of it, as one epoch over all data would. PSS
(``/proc/PID/smaps_rollup``, Linux) counts a page shared by n processes as 1/n in each, so that the sum over processes
is the real memory use; a copy per process would add the size of the data once per client.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from fedcross.core.settings import find
from fedcross.tasks.base import Task

MIB = 1024 * 1024


def load(name: str, root: Path) -> tuple[Task, float]:
    """Return the task and the seconds it took."""
    module = find("fedcross.tasks", name, "task")
    start = time.perf_counter()
    task: Task = module.load(module.Params(root=root))
    return task, time.perf_counter() - start


def pss() -> float:
    """Return this process's proportional set size in MiB."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def client(name: str, root: Path, barrier: Barrier, results: Any) -> None:
    """Load the task, read all of it, and report seconds and PSS while all clients still hold it."""
    barrier.wait()
    before = pss()
    barrier.wait()
    task, seconds = load(name, root)
    total = int(task.train.x.sum()) + int(task.test.x.sum()) + int(task.train.y.sum()) + int(task.test.y.sum())
    barrier.wait()
    results.put((seconds, before, pss(), total))
    barrier.wait()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", default="cifar10")
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=10)
    options = parser.parse_args()
    import torch  # noqa: F401  # training needs it anyway: not part of the data's time

    _, first = load(options.task, options.root)
    task, second = load(options.task, options.root)
    size = sum(part.x.nbytes + part.y.nbytes for part in (task.train, task.test)) / MIB
    print(f"{options.task}: {size:.1f} MiB decoded; first start {first:.3f} s, second start {second:.3f} s")
    context = multiprocessing.get_context("fork")
    for count in (1, options.clients):
        barrier, results = context.Barrier(count), context.SimpleQueue()
        workers = [
            context.Process(target=client, args=(options.task, options.root, barrier, results)) for _ in range(count)
        ]
        for worker in workers:
            worker.start()
        rows = [results.get() for _ in workers]
        for worker in workers:
            worker.join()
        seconds, before, after, _ = (list(column) for column in zip(*rows))
        print(
            f"{count} clients: load {max(seconds):.3f} s; sum of PSS {sum(before):.1f} -> {sum(after):.1f} MiB: "
            f"grows {sum(after) - sum(before):.1f} (a copy each would be {count * size:.1f})"
        )


if __name__ == "__main__":
    main()
