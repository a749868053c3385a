"""Parses a command line into jobs. A sweep comes from ``-m`` or from an experiment's own file."""

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
        The overrides of each job, without Hydra's own and, in a sweep, without settings that its choices lack.
    unused : tuple of str
        Settings of the command line that no job of the sweep has, such as a misspelled ``method.alfa``.
    folder : Path or None
        The folder of a sweep's runs.
    """

    flags: tuple[str, ...]
    overrides: tuple[str, ...]
    multirun: bool
    jobs: list[list[str]]
    unused: tuple[str, ...] = ()
    folder: Path | None = None


def plan(flags: list[str], overrides: list[str]) -> Plan:
    """Return what `overrides` would run.

    In a sweep, ``method.X=...`` applies to those methods that have a setting X. It becomes ``++method.X=...``, which
    Hydra accepts for every method; :func:`applicable` then drops it where it does not apply. The same holds for
    partitions and models.
    """
    asked = bool({"-m", "--multirun"} & set(flags))
    if not asked and _is_single(overrides):
        return Plan(tuple(flags), tuple(overrides), False, [overrides])
    params, own, folder = _hydra(overrides)
    if not (own or asked):
        return Plan(tuple(flags), tuple(overrides), False, [overrides])
    given = [_forced(o, params) for o in overrides]
    raw = _product([*(f"{name}={value}" for name, value in params.items()), *given])
    jobs = [applicable(job) for job in raw]
    unused = tuple(name for name in _unused(raw, jobs) if any(o.startswith(f"++{name}=") for o in given))
    return Plan(tuple(flags), tuple(given), True, jobs, unused, folder)


def applicable(overrides: list[str]) -> list[str]:
    """Return `overrides` without each ``++GROUP.X`` for which the group's choice has no setting X."""
    wanted = {found.group(1) for o in overrides if (found := FORCED.match(o))}
    fields = {group: _fields(group, overrides) for group in wanted}
    kept = []
    for override in overrides:
        found = FORCED.match(override)
        known = fields[found.group(1)] if found else None
        if not found or known is None or found.group(2) in known:
            kept.append(override)
    return kept


def _forced(override: str, params: dict[str, str]) -> str:
    """Return ``++method.X=...`` for ``method.X=...``, unless the experiment sweeps it under its plain name."""
    name = override.split("=")[0]
    return f"++{override}" if FORCED.match(f"++{name}") and name not in params else override


def _is_single(overrides: list[str]) -> bool:
    """Return whether this is a single run.

    Composes the configuration, which fails for a sweep with settings that only some of its methods have.
    """
    from fedcross.conf.compose import hydra_part

    try:
        return bool(hydra_part(overrides)["mode"] != "MULTIRUN")
    except ConfigError:
        return False


def _hydra(overrides: list[str]) -> tuple[dict[str, str], bool, Path | None]:
    """Return the sweep that the experiment defines, whether it is a sweep by itself, and the folder of its runs."""
    from fedcross.conf.compose import hydra_part

    part = hydra_part([o for o in overrides if o.startswith(("experiment=", "hydra"))])
    params = {str(name): str(value) for name, value in (part["params"] or {}).items()}
    return params, part["mode"] == "MULTIRUN", Path(part["dir"])


def _product(overrides: list[str]) -> list[list[str]]:
    """Return the override lists of all jobs; as in Hydra, a later value of a name replaces the earlier one."""
    return [list(job) for job in itertools.product(*choices(overrides).values())]


def choices(overrides: Sequence[str]) -> dict[str, list[str]]:
    """Return, for each name but Hydra's own, the overrides that it stands for: several in a sweep.

    Raises
    ------
    ConfigError
        If an override is not in Hydra's grammar.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except HydraException as error:
        from fedcross.conf.compose import explain

        raise ConfigError(explain(str(error))) from error
    found: dict[str, list[str]] = {}
    for one in parsed:
        line = one.input_line or ""
        name = line.split("=")[0]
        if name.startswith("hydra"):
            continue
        found[name] = [f"{name}={v}" for v in one.sweep_string_iterator()] if one.is_sweep_override() else [line]
    return found


def _unused(raw: list[list[str]], jobs: list[list[str]]) -> tuple[str, ...]:
    def names(several: list[list[str]]) -> set[str]:
        return {".".join(found.groups()) for job in several for o in job if (found := FORCED.match(o))}

    return tuple(sorted(names(raw) - names(jobs)))


def _fields(group: str, overrides: list[str]) -> set[str] | None:
    """Return the settings of the choice that `overrides` make for `group`; None if it does not exist or takes any."""
    from fedcross.conf.compose import compose
    from fedcross.conf.schema import settings_class

    choices = [o for o in overrides if o.startswith(CHOICES)]
    if any(o.startswith(f"{group}=") for o in choices):  # so the other groups change nothing: few compositions
        choices = [o for o in choices if o.startswith((f"{group}=", "experiment="))]
    try:
        chosen = compose(choices)[group]
        kind = settings_class(group, str(chosen.get("module", chosen["name"])))
        return None if kind.model_config.get("extra") == "allow" else set(kind.model_fields)
    except ConfigError:
        return None
