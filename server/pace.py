"""Estimates the seconds of a round from a few small training steps, for ``--cost`` on a CPU.

After one round of warm-up (none if it is very slow), client visits with few examples are measured in this process, on
one thread: one step of SMALL examples, one step of more examples and, if steps are quick, visits of several steps, as
many as fit into ROOM seconds. The differences give the seconds per step, per example and per visit. The estimate for a
round multiplies them by the number of visits and by the clients' average steps and examples, and divides by the
engine's workers. Visits that a virtual clock's deadline or a record of visits says are lost are not trained: they are
counted without training, and take no time. The server's work counts as in the small round. Only processor time is
measured, so other programs on the machine hardly change the estimate: the hours are those of an idle machine.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedcross.conf.schema import RunConfig
    from fedcross.tasks.data import FederatedData

#: Examples in the small step, in the large step (used if steps are quick), and in the evaluation.
SMALL, LARGE, TESTED = 1, 32, 8
#: If steps are quick: most steps of the long visit, which separates a visit's seconds from a step's; repetitions.
SEVERAL, TIMES = 20, 2
#: Seconds for the long visit of small steps. With fewer steps than SEVERAL, each visit is measured once.
ROOM = 0.4
#: How often the evaluation is measured, after once to warm up: SCORED times, and as long as they take less than SPELL
#: seconds together up to MOST_SCORED times. The shortest time counts.
SCORED, MOST_SCORED, SPELL = 3, 50, 0.1
#: Above this many seconds for a visit of one small step, the fixed part of a visit is negligible and not estimated. Up
#: to twice as many only if three examples take clearly longer than one: on a busy machine the visit itself is slow.
SLOW = 0.15
#: From this many seconds on, what a first visit does once is negligible too, so none is spent on warming up, unless a
#: visit with three times the examples is quicker.
VERY_SLOW = 1.0
#: From the first so many visits of a run, the share of those that are trained is taken.
VISITS = 1000
#: Bytes of a number on the wire, as ``compression`` has them.
BYTES = {"float32": 4.0, "float16": 2.0, "int8": 1.0}
#: Settings of the job that the measurement replaces, or that do not change what it measures. Tasks whose inputs have
#: one shape share a measurement: the number of classes and other examples hardly change a step.
OWN = (
    "rounds=", "output=", "logger=", "resume=", "seed=", "clients_per_round=", "evaluate_", "checkpoint.",
    "federation.", "engine=", "engine.", "hydra", "method.exchanges=", "snapshots.",
)  # fmt: skip


@dataclass(frozen=True)
class Seconds:
    """Seconds per step, per example in a step, per visit (without steps), of the server per round, per test example."""

    step: float
    example: float
    visit: float
    server: float
    tested: float


@dataclass(frozen=True)
class Job:
    """What the estimate needs of a job and its data.

    Attributes
    ----------
    config : RunConfig
        Its settings.
    trial : list of str
        The overrides of the small federation that stands for it.
    key : tuple of str
        Jobs with equal keys share a measurement.
    sizes : list of int
        Examples of each client in an epoch.
    tests : int
        Test examples.
    share : float
        Share of its visits that are trained; the others are lost, and take no time.
    """

    config: RunConfig
    trial: list[str]
    key: tuple[str, ...]
    sizes: list[int]
    tests: int
    share: float = 1.0

    @property
    def idle(self) -> str:
        """Why this run would train nothing, as far as is known before; empty if it would train."""
        if self.share:
            return ""
        config = self.config
        if config.clock.events is not None:
            why = f"the record clock.events={config.clock.events} accepted none of its visits. Name another one"
        else:
            why = f"no visit is over within clock.deadline_s={config.clock.deadline_s:g}. Raise it"
        return f"{config.names['method']} {config.names['task']}: nothing would be trained, for {why}."


def read(job: list[str]) -> Job:
    """Read the data of `job` and return what the estimate needs of them.

    Raises
    ------
    DataError
        If they are not there, or are others than they should be.
    """
    from fedcross.conf.schema import load
    from fedcross.core.errors import DataError
    from fedcross.server.places import elsewhere

    config = load(job)
    try:
        data = config.load_data()
    except DataError as error:
        if config.resume is None:
            raise
        raise elsewhere(config, error) from error
    trial = _trial(job, config)
    own = [o for o in (o.lstrip("+") for o in trial) if not o.startswith(("partition", "task="))]
    key = (*own, config.names["model"], *map(str, data.task.shape), str(data.task.augment is None))
    sizes = [min(len(part), config.train.examples or len(part)) for part in data.partition.train]
    return Job(config, trial, key, sizes, len(data.task.test), _share(config, data))


def _share(config: RunConfig, data: FederatedData) -> float:
    """Return the share of the visits of `config` that are trained, from the first :data:`VISITS` of them."""
    from fedcross.server.arrangements import examples_of
    from fedcross.strategies.asynchronous.forecast import Forecast
    from fedcross.strategies.round.clock import ReplayClock, VirtualClock, clock_of
    from fedcross.strategies.round.registry import method_class

    if not method_class(config.modules["method"]).asynchronous:
        return 1.0
    examples = examples_of(data, config.train.examples)
    clock = clock_of(config.clock, config.devices, config.seed, examples, config.train.epochs)
    visits = config.rounds * config.clients_per_round
    if isinstance(clock, ReplayClock):
        ended = sorted(clock.events.values(), key=lambda one: float(one["finish"]))[:visits]
        return mean(bool(one.get("accepted")) for one in ended)
    if not isinstance(clock, VirtualClock) or clock.deadline_s is None:
        return 1.0
    clients = config.clients_per_round if data.partition.own else len(data.partition)
    nbytes = _both_ways(config, data) if config.devices.bytes_per_second is not None else 0
    return Forecast(clock, config.clients_per_round, clients, nbytes, config.federation.lead).play(min(visits, VISITS))


def _both_ways(config: RunConfig, data: FederatedData) -> int:
    """Return about how many bytes a visit sends in both directions."""
    numbers = sum(weight.numel() for weight in config.network(data.task)[0].state_dict().values())
    return int(numbers * (BYTES[config.compression.down] + BYTES[config.compression.up]))


class Pace:
    """Estimates the pace of jobs; jobs with the same measured settings, model and inputs share one measurement."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], Seconds] = {}

    def __call__(self, job: Job) -> tuple[float, float]:
        """Return the seconds of a round of `job` without evaluation, and of one evaluation."""
        if job.key not in self._known:
            self._known[job.key] = measured(job.trial)
        seconds = self._known[job.key]
        return _round(job.config, seconds, job.sizes, job.share), seconds.tested * job.tests


def _round(config: RunConfig, seconds: Seconds, sizes: list[int], share: float = 1.0) -> float:
    """Return the seconds of a round whose clients have `sizes` examples; `share` of its visits are trained."""
    epoch = mean(math.ceil(n / config.train.batch) * seconds.step + n * seconds.example for n in sizes)
    exchanges = int(getattr(config.method, "exchanges", 0))
    hosts = getattr(config.method, "host_epochs", None) or config.train.epochs
    visits = (1 + exchanges) * seconds.visit + (config.train.epochs + exchanges * hosts) * epoch
    count = getattr(config.engine, "count", None)
    workers = min(int(count()) if callable(count) else 1, config.clients_per_round)
    return share * visits * math.ceil(config.clients_per_round / workers) + seconds.server


def _trial(job: list[str], config: RunConfig) -> list[str]:
    """Return the overrides of the small federation that stands for `job` in the measurement."""
    kept = [o for o in without_losses(job, config) if not o.lstrip("+").startswith(OWN)]
    drawn = 2 if hasattr(config.method, "exchanges") else max(1, len(getattr(config.method, "widths", ())))
    return [*kept, f"clients_per_round={drawn}", "logger=none", "engine=local", "engine.workers=1", "device=cpu"]


def without_losses(job: list[str], config: RunConfig) -> list[str]:
    """Return the overrides of `job` with a clock that loses no visit and repeats none, for an asynchronous method.

    A lost visit is not trained and takes no time, so a few of them say little: their share is known without measuring.
    """
    from fedcross.strategies.round.registry import method_class

    if not method_class(config.modules["method"]).asynchronous:
        return job
    kept = [o for o in job if not o.lstrip("+").startswith("clock")]
    return [*kept, "clock=virtual", "++clock.deadline_s=null"]


def measured(trial: list[str]) -> Seconds:
    """Return the seconds that the steps of the small federation `trial` take."""
    with tempfile.TemporaryDirectory(prefix="fedcross-cost-") as folder, _states(folder):
        bench = _Bench(trial, folder)
        low, server = bench.visit(SMALL)
        high = bench.visit(3 * SMALL)[0] if low >= VERY_SLOW else 0.0
        if high < low:  # no slow step: the visit was quick, or did once what later ones need not (compile a loop, say)
            low, server = bench.visit(SMALL)
            high = 0.0
        if low > SLOW and not high:
            high = bench.visit(3 * SMALL)[0]
        if low > 2 * SLOW or high > 1.5 * low:  # else the visit itself takes long, as on a busy machine, not its step
            # Both times are noisy: the part that does not grow with the examples is at most half of the larger step.
            example = min(max((high - low) / 2, high / 6), high / 3) / SMALL
            return Seconds(max(low - SMALL * example, 0.0), example, 0.0, server, bench.evaluation())
        # Quick steps are timed several times; the shortest time counts, as it is the least disturbed.
        steps = max(2, min(SEVERAL, int(ROOM / max(low, ROOM / SEVERAL))))
        times = TIMES if steps == SEVERAL else 1
        one = min(bench.visit(SMALL)[0] for _ in range(TIMES))
        many = min(bench.visit(SMALL, steps)[0] for _ in range(times))
        large = min(bench.visit(LARGE, steps)[0] for _ in range(times))
        example = max(large - many, 0.0) / (steps * (LARGE - SMALL))
        step = max(many - one, 0.0) / (steps - 1)
        return Seconds(max(step - SMALL * example, 0.0), example, max(one - step, 0.0), server, bench.evaluation())


class _Bench:
    """A federation in this process; the caller chooses how many steps its clients take and on how many examples."""

    def __init__(self, trial: list[str], folder: str) -> None:
        from fedcross.client.app import app
        from fedcross.client.workshop import workshop
        from fedcross.conf.compose import join
        from fedcross.conf.schema import load
        from fedcross.engines.grid import LocalGrid
        from fedcross.server.launch import quote
        from fedcross.server.progress import Lines
        from fedcross.server.session import Session

        overrides = [*trial, f"output={quote(folder)}"]
        config = load(overrides)
        clients = getattr(config.partition, "clients", None) or config.clients_per_round
        self._grid = LocalGrid(app, clients, {"overrides": join(overrides)})
        self._session = Session(config, self._grid, Lines())
        if self._session.visits is not None:  # a trial keeps no record
            self._session.visits.close()
            self._session.method.on_visit = None
        self._shop = workshop(join(overrides))
        self._number = 0

    def visit(self, examples: int, steps: int = 1) -> tuple[float, float]:
        """Return the seconds of a visit with `steps` steps of `examples` examples, and the server's in that round."""
        own = {"examples": examples, "batch": examples, "epochs": steps}
        train = self._shop.config.train.model_copy(update=own)
        self._shop.config = self._shop.config.model_copy(update={"train": train})
        self._number += 1
        started = time.process_time()
        report = self._session.method.run_round(self._number, self._grid)
        seconds = time.process_time() - started
        server = seconds * report.seconds_aggregation / (report.seconds_aggregation + report.seconds_training)
        return (seconds - server) / max(report.clients, 1), server

    def evaluation(self) -> float:
        """Return the seconds per example that the evaluation takes; models of all widths as if they were full ones."""
        import torch

        evaluator, task = self._session.evaluator, self._shop.data.task
        inputs, threads = task.prepare(task.test.x[:TESTED]), torch.get_num_threads()
        torch.set_num_threads(1)  # several wait for each other on a busy machine, in processor time
        try:
            with torch.no_grad():
                shortest = _shortest(lambda: evaluator.model(inputs))
        finally:
            torch.set_num_threads(threads)
        models = max(1, len(self._session.method.all_sizes()))
        return models * shortest / len(inputs) / threads


def _shortest(once: Callable[[], object]) -> float:
    """Return the least seconds of the process that a call of `once` takes, of several after the first."""
    once()
    taken: list[float] = []
    while len(taken) < SCORED or (len(taken) < MOST_SCORED and sum(taken) < SPELL):
        started = time.process_time()
        once()
        taken.append(time.process_time() - started)
    return min(taken)


@contextmanager
def _states(folder: str) -> Iterator[None]:
    """Keep the clients' states in `folder` inside the block."""
    before = os.environ.get("FEDCROSS_STATE")
    os.environ["FEDCROSS_STATE"] = str(Path(folder) / "clients")
    try:
        yield
    finally:
        if before is None:
            del os.environ["FEDCROSS_STATE"]
        else:
            os.environ["FEDCROSS_STATE"] = before
