"""Parses overrides into the jobs of a sweep, which comes from ``-m`` or from an experiment's own file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedcross.core.errors import ConfigError

#: ``++GROUP.X=...``: a setting that applies to those choices of the group that have it.
FORCED = re.compile(r"^\+\+(method|partition|model)\.(\w+)")
CHOICES = ("experiment=", "task=", "method=", "partition=", "model=")


@dataclass(frozen=True)
class Plan:
    """A parsed command line.

    Attributes
    ----------
    flags : tuple of str
        Hydra's flags, as given.
    overrides : tuple of str
        The overrides for Hydra.
    multirun : bool
        Whether this is a sweep.
    jobs : list of list of str
        The overrides of each job, without Hydra's own and without settings that its choices lack. Of a search
        (``hydra/sweeper=optuna``) one job, with the first value of every range.
    unused : tuple of str
        Settings of the command line that no job of the sweep has, such as a misspelled ``method.alfa``.
    folder : Path or None
        The folder of a sweep's runs.
    search : bool
        Whether a sweeper proposes the jobs one after another.
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

    In a sweep, ``method.X=...`` applies to those methods that have a setting X: it becomes ``++method.X=...``, which
    Hydra accepts for every method, and :func:`applicable` drops it where it does not apply. The same holds for
    partitions and models.
    """
    from fedcross.conf.compose import composed, resolved

    asked = bool({"-m", "--multirun"} & set(flags))
    single = Plan(tuple(flags), tuple(overrides), False, [list(overrides)])
    if not asked and _is_single(overrides):
        return single
    chosen = composed([o for o in overrides if o.startswith(("experiment=", "hydra"))])
    mode, params, folder, sweeper = resolved(
        chosen, "hydra.mode", "hydra.sweeper.params", "hydra.sweep.dir", "hydra.sweeper._target_"
    )
    if not (asked or getattr(mode, "name", mode) == "MULTIRUN"):
        return single
    swept = {str(name): str(value) for name, value in (params or {}).items()}
    search = "BasicSweeper" not in str(sweeper)
    given = [*overrides, *_study(sweeper, overrides)] if search else [_forced(o, swept) for o in overrides]
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


def _forced(override: str, swept: dict[str, str]) -> str:
    """Return ``++method.X=...`` for ``method.X=...``, unless the experiment sweeps it under its plain name."""
    name = override.split("=")[0]
    return f"++{override}" if FORCED.match(f"++{name}") and name not in swept else override


def _forced_names(jobs: list[list[str]]) -> set[str]:
    return {".".join(found.groups()) for job in jobs for o in job if (found := FORCED.match(o))}


def _is_single(overrides: Sequence[str]) -> bool:
    """Return whether `overrides` compose to one run; they do not with settings that only some methods have."""
    from fedcross.conf.compose import composed, resolved

    try:
        (mode,) = resolved(composed(overrides), "hydra.mode")
        return bool(getattr(mode, "name", mode) != "MULTIRUN")
    except ConfigError:
        return False


def choices(overrides: Sequence[str]) -> dict[str, list[str]]:
    """Return, for each name but Hydra's own, the overrides that it stands for: several in a sweep.

    A later value of a name replaces the earlier one. Of an interval only its start is returned.

    Raises
    ------
    ConfigError
        If an override is not in Hydra's grammar.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    from fedcross.conf.compose import explain

    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        raise ConfigError(explain(str(error), overrides)) from error
    found: dict[str, list[str]] = {}
    for one in parsed:
        line = one.input_line or ""
        name = line.split("=")[0]
        if name.startswith("hydra"):
            continue
        if one.is_interval_sweep():
            found[name] = [f"{name}={one.value().start}"]  # type: ignore[union-attr]
        elif one.is_sweep_override():
            found[name] = [f"{name}={value}" for value in one.sweep_string_iterator()]
        else:
            found[name] = [line]
    return found


def _fields(group: str, overrides: Sequence[str]) -> set[str] | None:
    """Return the settings of the choice that `overrides` make for `group`; None if it does not exist or takes any."""
    from fedcross.conf.compose import compose
    from fedcross.conf.schema import settings_class

    chosen = [o for o in overrides if o.startswith(CHOICES)]
    if any(o.startswith(f"{group}=") for o in chosen):  # the other groups change nothing: fewer compositions
        chosen = [o for o in chosen if o.startswith((f"{group}=", "experiment="))]
    try:
        node = compose(chosen)[group]
        kind = settings_class(group, str(node.get("module", node["name"])))
        return None if kind.model_config.get("extra") == "allow" else set(kind.model_fields)
    except ConfigError:
        return None
