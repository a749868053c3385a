"""Sweeps: which jobs a command line describes, and how each of them is run, continued or skipped.

A sweep comes from ``-m`` or from an experiment's own file. A job's folder is named by its settings, so the same command
with the same ``hydra.sweep.dir`` continues a sweep, and two such commands share the work. Hydra's parallel launchers
import this module by name.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fedcross.conf.compose import compose, composed, explain, resolved
from fedcross.conf.schema import RunConfig, load, settings_class
from fedcross.core.errors import ConfigError, counted
from fedcross.core.events import say
from fedcross.core.settings import quote
from fedcross.server.announce import announce
from fedcross.server.checkpoint import Checkpoints
from fedcross.server.identity import describe, differing, fingerprint
from fedcross.server.launch import SERVER_ENDS_S, launch
from fedcross.server.run_folder import FolderInUseError, claimed, saved_overrides, written

#: ``++GROUP.X=...``: a setting that applies to those choices of the group that have it.
FORCED = re.compile(r"^\+\+(method|partition|model)\.(\w+)")
CHOICES = ("experiment=", "task=", "method=", "partition=", "model=")


@dataclass(frozen=True)
class Plan:
    """A parsed command line: Hydra's `flags` and `overrides`, as given, and the runs that they describe.

    `multirun` is true for a sweep, `search` for one whose sweeper proposes its jobs one after another (Optuna). `jobs`
    are the overrides of each job, without Hydra's and those that its choices lack; of a search one job, with the first
    value of every range. `unused` are settings that no job has, such as ``method.alfa``; `folder` is the sweep's.
    """

    flags: tuple[str, ...]
    overrides: tuple[str, ...]
    multirun: bool
    jobs: list[list[str]]
    unused: tuple[str, ...] = ()
    folder: Path | None = None
    search: bool = False


def plan(flags: Sequence[str], overrides: Sequence[str]) -> Plan:
    """Return what `overrides` would run.

    In a sweep, ``method.X=...`` becomes ``++method.X=...``, which Hydra accepts for every method, and
    :func:`applicable` drops it for methods without a setting X. The same holds for partitions and models.
    """
    asked = bool({"-m", "--multirun"} & set(flags))
    single = Plan(tuple(flags), tuple(overrides), False, [list(overrides)])
    if not asked and _is_single(overrides):
        return single
    chosen = composed([o for o in overrides if o.startswith(("experiment=", "hydra"))])
    names = ("hydra.mode", "hydra.sweeper.params", "hydra.sweep.dir", "hydra.sweeper._target_")
    mode, params, folder, sweeper = resolved(chosen, *names)
    if not (asked or _is_multirun(mode)):
        return single
    swept = {str(name): str(value) for name, value in (params or {}).items()}
    search = "BasicSweeper" not in str(sweeper)
    plain = {o for o in overrides if o.split("=")[0] in swept or not FORCED.match(f"++{o}")}
    given = [*overrides, *_study(sweeper, overrides)] if search else [o if o in plain else f"++{o}" for o in overrides]
    values = choices([*(f"{name}={value}" for name, value in swept.items()), *given])
    raw = [list(job) for job in itertools.product(*(v[:1] if search else v for v in values.values()))]
    jobs = [applicable(job) for job in raw]
    lost = _forced_names(raw) - _forced_names(jobs)
    unused = tuple(sorted(name for name in lost if any(o.startswith(f"++{name}=") for o in given)))
    return Plan(tuple(flags), tuple(given), True, jobs, unused, Path(str(folder)), search)


def _study(sweeper: object, overrides: Sequence[str]) -> list[str]:
    """Return settings of an Optuna study that `overrides` leave open: it maximises, and a repeated one continues."""
    if "Optuna" not in str(sweeper):
        return []
    usual = {"hydra.sweeper.direction": "maximize", "hydra.sweeper.n_jobs": "1", "hydra.sweeper.sampler.seed": "1"}
    named = {o.partition("=")[0] for o in overrides}
    if any(o.startswith("hydra/sweeper/sampler=grid") for o in overrides):
        named.add("hydra.sweeper.sampler.seed")
    return [f"{name}={value}" for name, value in usual.items() if name not in named]


def applicable(overrides: Sequence[str]) -> list[str]:
    """Return `overrides` without each ``++GROUP.X`` for which the group's choice has no setting X."""
    found = {override: FORCED.match(override) for override in overrides}
    fields = {group: _fields(group, overrides) for group in {match.group(1) for match in found.values() if match}}
    return [o for o, m in found.items() if not m or (known := fields[m.group(1)]) is None or m.group(2) in known]


def _forced_names(jobs: list[list[str]]) -> set[str]:
    return {".".join(found.groups()) for job in jobs for o in job if (found := FORCED.match(o))}


def _is_single(overrides: Sequence[str]) -> bool:
    """Return whether `overrides` compose to one run; they do not with settings that only some methods have."""
    with suppress(ConfigError):
        return not _is_multirun(*resolved(composed(overrides), "hydra.mode"))
    return False


def _is_multirun(mode: object) -> bool:
    return getattr(mode, "name", mode) == "MULTIRUN"


def choices(overrides: Sequence[str]) -> dict[str, list[str]]:
    """Return, for each name but Hydra's, its last overrides: several in a sweep; of an interval only its start."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(explain(str(error), overrides)) from error
    found: dict[str, list[str]] = {}
    for one in parsed:
        name, values = (one.input_line or "").split("=")[0], [one.input_line or ""]
        if one.is_interval_sweep():
            values = [f"{name}={one.value().start}"]  # type: ignore[union-attr]
        elif one.is_sweep_override():
            values = [f"{name}={value}" for value in one.sweep_string_iterator()]
        found[name] = values
    return {name: values for name, values in found.items() if not name.startswith("hydra")}


def _fields(group: str, overrides: Sequence[str]) -> set[str] | None:
    """Return the settings of the choice that `overrides` make for `group`; None if it does not exist or takes any."""
    chosen = [o for o in overrides if o.startswith(CHOICES)]
    if any(o.startswith(f"{group}=") for o in chosen):  # the other groups change nothing: fewer compositions
        chosen = [o for o in chosen if o.startswith((f"{group}=", "experiment="))]
    try:
        node = compose(chosen)[group]
        kind = settings_class(group, str(node.get("module", node["name"])))
        return None if kind.model_config.get("extra") == "allow" else set(kind.model_fields)
    except ConfigError:
        return None


def job_name(overrides: Sequence[str]) -> str:
    """Return the name of the folder of the job that `overrides` describe."""
    config = load(overrides)
    return f"{config.names['method']}-{config.names['task']}-seed{config.seed}-{fingerprint(config)}"


# ``hydra.sweep.subdir`` calls this with Hydra's whole configuration.
OmegaConf.register_new_resolver(
    "fedcross_job", lambda *, _root_: job_name(applicable(list(map(str, _root_.hydra.overrides.task)))), replace=True
)


def job(_: Any) -> float | None:
    """Run one job of Hydra's sweep; return its validation accuracy, or else its test accuracy, for a search."""
    from hydra.core.hydra_config import HydraConfig

    state = HydraConfig.get()
    folder = Path(state.runtime.output_dir)
    sweep_job([str(o) for o in state.overrides.task], folder)
    found = result_in(folder)
    score = found.get("validation_accuracy", found.get("final_accuracy"))
    return None if score is None else float(score)


def sweep_job(overrides: Sequence[str], folder: Path) -> None:
    """Run the rounds of `overrides` that `folder` lacks; a ConfigError if it holds another configuration."""
    overrides = applicable(overrides)
    try:
        with claimed(folder):
            rounds, finished = progress(folder, load(overrides))
            if finished:
                say(f"Already finished, {counted(rounds, 'round')}: {folder}")
                return
            if rounds:
                say(f"Continued after round {rounds}: {folder}")
                overrides = [*overrides, f"resume={quote(str(folder))}"]
            else:
                with written(folder, wait_s=SERVER_ENDS_S):  # a server may still write whose command was killed
                    for name in ("metrics.jsonl", "audit.jsonl", "visits.jsonl", "requests.jsonl"):
                        (folder / name).unlink(missing_ok=True)
            announce(overrides)
            launch(overrides, folder, claim=False)
    except FolderInUseError:
        say(f"Already running in another process: {folder}")


def progress(folder: Path, config: RunConfig) -> tuple[int, bool]:
    """Return after which round `config` goes on in `folder`, and whether it has finished, or raise a ConfigError."""
    checkpoints, result = Checkpoints(folder), result_in(folder)
    identity = checkpoints.identity()
    if identity is None:
        if not result:
            return 0, False
        identity = {"config": describe(load(saved_overrides(folder)))}  # the checkpoints were deleted
    if differs := differing(identity, config):
        facts = ", ".join(f"{name} {old!r}, now {new!r}" for name, (old, new) in differs.items())
        raise ConfigError(f"{folder}: another configuration is here ({facts}). Choose another hydra.sweep.dir.")
    rounds = int(result.get("rounds", 0))
    finished = rounds >= config.rounds or bool(result.get("stopped"))
    return (rounds, True) if finished else (max(checkpoints.rounds(), default=0), False)


def result_in(folder: Path) -> dict[str, Any]:
    """Return the content of ``result.json``; empty if there is none."""
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return found
    return {}
