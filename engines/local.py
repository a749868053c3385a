"""The default engine: a Flower Grid on this machine.

With ``workers=1``, clients run one after another in this process, where a debugger works. With more workers, they run
in worker processes (:mod:`engines.workers`). The results are equal to the bit.
"""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import Field

from fedcross.core.settings import Settings
from fedcross.engines.grid import LocalGrid, serve
from fedcross.engines.job import Capabilities, Job

CAPABILITIES = Capabilities()


class Params(Settings):
    """``workers``: processes that train clients; 1 trains in this process, ``auto`` is one per core, or one per GPU."""

    workers: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"

    def count(self, gpus: int = 0) -> int:
        """Return the number of workers on this machine, whose clients train on `gpus` GPUs (0: on the CPU).

        Each process on a GPU has a context of half a GB there, and one keeps a GPU busy.
        """
        return (gpus or cores()) if self.workers == "auto" else self.workers


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(job: Job) -> None:
    """Run `job` on this machine."""
    settings: Params = job.settings
    grid = open_grid(job, min(settings.count(job.gpus), job.clients))
    try:
        serve(job, grid)
    finally:
        grid.close()


def open_grid(job: Job, workers: int) -> LocalGrid:
    """Return a grid of `workers` processes for `job`."""
    config = {"overrides": job.overrides}
    if workers == 1:
        return LocalGrid(job.client, job.clients, config)
    from fedcross.engines.workers import WorkersGrid  # imported only for several workers

    fork, sizes = job.warm() if job.warm is not None else (True, ())
    devices = [f"cuda:{number}" for number in range(job.gpus)] if job.gpus > 1 else []
    return WorkersGrid(job.client, job.clients, config, workers, sizes=sizes, fork=fork, devices=devices)
