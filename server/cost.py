"""``fedcross ... --cost``: estimates runs, rounds and hours of a command line without running it.

On a CPU, a few small training steps give a first estimate for every kind of job (:mod:`server.pace`). If by these
estimates one whole round of every kind fits into WHOLE seconds, whole rounds are measured instead.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcross.server.sweep import Plan

if TYPE_CHECKING:
    from fedcross.conf.schema import RunConfig
    from fedcross.server.pace import Job

#: If the first round takes less than this many seconds, start-up dominates it: four rounds are measured, and the first
#: of them does not count; if it takes less than SHORT seconds, whatever else runs here disturbs it: MANY rounds.
QUICK, SHORT = 20.0, 0.3
MORE, MANY = 4, 10
#: Seconds that the start of a measured run takes.
STARTS = 0.5
#: Most seconds for measuring whole rounds, all kinds of jobs together.
WHOLE = 15.0
#: Settings that determine how long a round takes, besides the names of method, task, model and engine. Of a group, all
#: of its settings: a model or a method of a plug-in may have any.
WEIGHTY = (
    "clients_per_round", "train.epochs", "train.batch", "train.examples", "train.precision", "train.deterministic",
    "train.only", "train.clip", "evaluate_local", "evaluate_clients", "engine", "device", "task", "model", "method",
    "partition", "clock", "devices", "compression", "privacy.enabled", "defence.enabled", "attack.name",
    "federation.enough_replies", "federation.hedge", "federation.reassign",
)  # fmt: skip
#: Those of them that do not: they say how much, when, from where, or which of several things that take equally long.
LIGHT = (
    "task.root", "task.download", "task.mean", "task.std", "method.alpha", "method.storage", "method.weighting",
    "method.weight", "method.broadcast", "method.matching", "method.global_model", "method.gap", "method.first_stage",
    "method.ramp", "method.daisy", "method.average", "method.acceleration_rounds", "method.independent_start",
    "partition.sampler", "partition.authors_seed", "partition.min_size", "partition.max_draws",
)  # fmt: skip
#: Numbers of which it matters whether they are 0 or unset, and not how large they are; in a method, all numbers but the
#: whole ones are such: the weight of a term costs nothing, the term does.
SWITCHES = ("train.clip", "model.dropout", "partition.args")
#: A step of the optimiser, as in ``method.host_lr``: whatever it is, it takes equally long.
RATE = re.compile(r"method\.(\w+_)?lr(_decay|_min)?")

#: What stands for the value of such a number where it is not 0.
NONZERO = "nonzero"

SEED = re.compile(r"seed=\d+")

Pace = tuple[float, float]
"""Seconds of a round without evaluation, and seconds of one evaluation."""


@dataclass
class Cell:
    """Jobs whose rounds take equally long.

    Attributes
    ----------
    names : tuple of str
        Method, task, model, engine.
    job : list of str
        The overrides of one of them.
    weighty : dict of str to str
        The settings that determine how long a round takes.
    runs, done : int
        How many runs there are, and how many of them are finished.
    rounds, evaluations : int
        Rounds that all of them together still have to run, and evaluations in these rounds.
    """

    names: tuple[str, str, str, str]
    job: list[str]
    weighty: dict[str, str]
    runs: int = 0
    done: int = 0
    rounds: int = 0
    evaluations: int = 0

    def hours(self, pace: Pace) -> float:
        """Return the hours that the remaining rounds take, one run after the other."""
        return (self.rounds * pace[0] + self.evaluations * pace[1]) / 3600


def cells(plan: Plan) -> list[Cell]:
    """Group the jobs of `plan` by the settings that determine their speed; return the groups in the plan's order.

    Raises
    ------
    ConfigError, StorageError
        If a run would be refused for what its folder holds.
    """
    from fedcross.conf.schema import load
    from fedcross.server.identity import fingerprint

    seen: set[str] = set()
    found: dict[str, Cell] = {}
    for job in plan.jobs:
        seed = next((o for o in job if plan.multirun and SEED.fullmatch(o)), None)
        job = [o for o in job if o != seed]  # of several jobs that differ only in the seed, one is composed
        config = load(job)
        if seed is not None:
            config = config.model_copy(update={"seed": int(seed.removeprefix("seed="))})
        mark = fingerprint(config)
        if mark in seen:
            continue
        seen.add(mark)
        names = (config.names["method"], config.names["task"], config.names["model"], config.names["engine"])
        weighty = _weighty(config)
        cell = found.setdefault(json.dumps([names, weighty]), Cell(names, job, weighty))
        before = _rounds_done(plan, config, mark)
        cell.runs += 1
        last = min(config.rounds, config.stop_at or config.rounds)
        cell.done += before >= last
        left = range(before + 1, last + 1)
        cell.rounds += len(left)
        cell.evaluations += sum(r % config.evaluate_every == 0 or r == config.rounds for r in left)
    return list(found.values())


def _weighty(config: RunConfig) -> dict[str, str]:
    """Return the settings that determine how long a round of `config` takes, as texts; see :data:`WEIGHTY`."""
    from fedcross.server.identity import flatten

    flat = flatten(config.model_dump(mode="json")) | {"partition.name": config.names["partition"]}
    return {name: _weight(name, value) for name, value in sorted(flat.items()) if _is_weighty(name)}


def _is_weighty(name: str) -> bool:
    return _below(name, WEIGHTY) and not _below(name, LIGHT) and not RATE.fullmatch(name)


def _below(name: str, groups: Sequence[str]) -> bool:
    """Return whether the setting `name` is one of `groups` or in one of them."""
    return any(f"{name}.".startswith(f"{group}.") for group in groups)


def _weight(name: str, value: Any) -> str:
    """Return what the time of a round can depend on in the `value` of a setting."""
    switch = _below(name, SWITCHES) or (isinstance(value, float) and _below(name, ("method", "partition")))
    if switch and isinstance(value, int | float) and not isinstance(value, bool) and value != 0:
        return NONZERO
    return value if isinstance(value, str) else json.dumps(value)


def _apart(cell: Cell, others: Sequence[Cell]) -> str:
    """Return the settings in which `cell` differs from others of the same names, as overrides."""
    rivals = [other.weighty for other in others if other.names == cell.names]
    unlike = {name: value for name, value in cell.weighty.items() if any(r.get(name) != value for r in rivals)}
    chosen = {name.removesuffix(".name") for name in unlike if name.endswith(".name")}  # its settings follow from it
    shown = {group: cell.weighty[f"{group}.name"] for group in sorted(chosen)}
    shown |= {name: value for name, value in unlike.items() if not _below(name, tuple(chosen))}
    return " ".join(f"{name}={value}" for name, value in shown.items()).replace(", ", ",")


def _rounds_done(plan: Plan, config: RunConfig, mark: str) -> int:
    """Return how many rounds of `config` its folder already holds; refuse what the run itself would refuse."""
    from fedcross.server.jobs import place, standing
    from fedcross.server.launch import rounds_before

    if not plan.multirun:
        folder, chosen = place(plan.overrides)
        return rounds_before(config, folder, claim=chosen)
    if plan.folder is None or not plan.folder.is_dir():
        return 0
    found = next(iter(sorted(plan.folder.glob(f"*-{mark}"))), None)
    return standing(found, config)[1] if found is not None else 0


def paces(jobs: list[list[str]]) -> list[Pace | str]:
    """Return the pace of each job; for a job whose pace cannot be told, the reason.

    Estimates it for the local engine on a CPU; measures whole rounds elsewhere, or if all rounds are short enough. All
    data are read before anything is measured.

    Raises
    ------
    FedcrossError
        If every job has an error, such as data that cannot be read.
    """
    from fedcross.client.device import pick_device
    from fedcross.core.errors import DataError, FedcrossError
    from fedcross.server import pace

    ready: dict[int, pace.Job] = {}
    faults: dict[int, FedcrossError] = {}
    for number, job in enumerate(jobs):
        try:
            ready[number] = pace.read(job)
        except DataError as error:
            faults[number] = error
    reasons = {number: one.idle for number, one in ready.items() if one.idle}
    left = [number for number in ready if number not in reasons]
    configs = [ready[number].config for number in left]
    on_cpu = all(pick_device(config.device).type == "cpu" and config.names["engine"] == "local" for config in configs)
    found: dict[int, Pace] = {}

    def take(pace_of: Callable[[int], Pace | str]) -> None:
        for number in [one for one in left if one not in faults]:
            try:
                told = pace_of(number)
            except FedcrossError as error:
                faults[number] = error
                continue
            if isinstance(told, str):
                reasons[number] = told
            else:
                found[number] = told

    if on_cpu:
        estimate = pace.Pace()
        take(lambda number: estimate(ready[number]))
    # A measured round loses no visit (without_losses), so it takes longer than one of the run.
    whole = sum(one[0] / ready[number].share + one[1] + STARTS for number, one in found.items()) * (1 + MORE)
    if not on_cpu or whole <= WHOLE:
        found.clear()
        take(lambda number: measure(jobs[number], ready[number]))
    if faults and len(faults) == len(jobs):
        raise next(iter(faults.values()))
    reasons |= {number: str(error) for number, error in faults.items()}
    return [reasons[number] if number in reasons else found[number] for number in range(len(jobs))]


def measure(job: list[str], read: Job) -> Pace | str:
    """Run one round of `job` (more if it is short) in a temporary folder and return the measured pace.

    Returns the reason if nothing was trained: `job` is then such that its first rounds, and maybe all, train nothing.
    """
    from fedcross.server.pace import without_losses

    trial = without_losses([o for o in job if not _is_replaced(o)], read.config)
    first = _measured(trial, 1, read.share)
    if first is not None and sum(first) > QUICK:
        return first
    names = read.config.names
    rounds = MANY if first is not None and sum(first) < SHORT else MORE
    return _measured(trial, rounds, read.share) or (
        f"{names['method']} {names['task']}: no reply was accepted in the first {rounds} rounds, so nothing says how "
        "long one takes. See the warnings above; is federation.deadline_s too short?"
    )


def _is_replaced(override: str) -> bool:
    """Return whether a measured run has a value of its own for what `override` sets."""
    from fedcross.conf.compose import is_hydras

    return is_hydras(override) or override.split("=")[0] in {"rounds", "stop_at", "output", "logger", "resume"}


def _measured(job: list[str], rounds: int, share: float) -> Pace | None:
    """Return the pace of `rounds` rounds of `job`, with `share` of their training; None if nothing was trained."""
    from fedcross.core.errors import FederationError
    from fedcross.server.launch import launch, quote

    with tempfile.TemporaryDirectory(prefix="fedcross-cost-") as folder:
        trial = [f"rounds={rounds}", "evaluate_every=1", "logger=none", "checkpoint.milestone=0", "snapshots.rounds=[]"]
        metrics = Path(folder) / "metrics.jsonl"
        try:
            launch([*job, *trial, f"output={quote(folder)}"], Path(folder))
        except FederationError:
            lines = _lines(metrics)
            if not lines or any(line["bytes_up"] or line["train_loss"] is not None for line in lines):
                raise
            return None
        lines = _lines(metrics)
    steady = lines[1:] or lines
    working = [share * line["seconds_training"] + line["seconds_aggregation"] for line in steady]
    others = [line["seconds"] - line["seconds_training"] - line["seconds_aggregation"] for line in steady]
    # What else runs here can disturb a short evaluation by more than it takes; it takes equally long in every round.
    return statistics.median(working), max(min(others), 0.0)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a ``metrics.jsonl``; none if there is no such file."""
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def show(plan: Plan, pace: Callable[[list[list[str]]], Sequence[Pace | str]] = paces) -> None:
    """Print how long `plan` would take on this machine; below the table, why rows have "-" in place of numbers."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Cost on this machine, one run after the other")
    for name in ("method", "task", "model", "engine"):
        table.add_column(name, no_wrap=True)
    rows, total = cells(plan), 0.0
    apart = [_apart(cell, rows) for cell in rows]
    if any(apart):
        table.add_column("settings")
    for name in ("runs", "done", "rounds left", "s/round", "s/evaluation", "hours"):
        table.add_column(name, justify="right", no_wrap=True)
    measured = iter(pace([cell.job for cell in rows if cell.rounds]))
    reasons: list[str] = []
    for cell, settings in zip(rows, apart):
        seconds = next(measured) if cell.rounds else (math.nan, math.nan)
        if isinstance(seconds, str):
            reasons.append(seconds)
            shown = ["-"] * 3
        else:
            hours = cell.hours(seconds) if cell.rounds else 0.0
            total += hours
            shown = [*("-" if math.isnan(s) else f"{s:.3g}" for s in seconds), f"{hours:.3g}"]
        own = [settings] if any(apart) else []
        table.add_row(*cell.names, *own, str(cell.runs), str(cell.done), str(cell.rounds), *shown)
    table.add_section()
    sums = [str(sum(getattr(cell, name) for cell in rows)) for name in ("runs", "done", "rounds")]
    table.add_row("total", *[""] * (4 if any(apart) else 3), *sums, "", "", f"{total:.3g}")
    console = Console()
    if not console.is_terminal:
        console.width = 140
    console.print(table)
    if reasons:
        console.print(f"The total is without {len(reasons)} of {len(rows)} rows. Not measured (-):", soft_wrap=True)
    for reason in dict.fromkeys(reasons):
        console.print(f"  {reason}", soft_wrap=True, highlight=False, markup=False)
