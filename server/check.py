"""The command line, checked before Hydra starts anything: every job of a sweep, all faults at once."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from tasks.errors import ConfigError, StorageError

#: Jobs of a sweep that are checked beforehand; the rest are checked when they start.
MOST_JOBS = 256
FORCED = re.compile(r"^\+\+method\.(\w+)")


def check_overrides(arguments: list[str]) -> list[str]:
    """Check what `arguments` would run and return what to hand to Hydra.

    A resumed run's own overrides are put in front. In a sweep, ``method.X=...`` is for those methods that have a
    setting X; it becomes ``++method.X=...`` so that Hydra accepts it for the others, where :func:`applicable` drops it.

    Raises
    ------
    ConfigError
        With every fault of every job.
    """
    flags = [a for a in arguments if a.startswith("-")]
    given = [a for a in arguments if not a.startswith("-")]
    overrides = [*_saved(given), *given]
    multirun = bool({"-m", "--multirun"} & set(flags))
    if multirun:
        overrides = [f"++{o}" if o.startswith("method.") else o for o in overrides]
    jobs = _jobs(overrides) if multirun else [overrides]
    faults: list[str] = []
    for job in jobs:
        faults += [fault for fault in _faults(applicable(job) if multirun else job) if fault not in faults]
    if multirun:
        faults += _unused(jobs)
    if faults:
        raise ConfigError(faults)
    return [*flags, *overrides]


def applicable(overrides: list[str]) -> list[str]:
    """Return `overrides` without those ``++method.X`` that the chosen method does not have."""
    fields = _method_fields(overrides)
    return [o for o in overrides if not (found := FORCED.match(o)) or fields is None or found.group(1) in fields]


def _unused(jobs: list[list[str]]) -> list[str]:
    """Return a fault for every ``++method.X`` that no method of the sweep has."""
    kept = {o for job in jobs for o in applicable(job)}
    names = {found.group(1) for job in jobs for o in job if o not in kept and (found := FORCED.match(o))}
    used = {found.group(1) for o in kept if (found := FORCED.match(o))}
    return [f"method.{name}: no method of this sweep has such a setting." for name in sorted(names - used)]


def _method_fields(overrides: list[str]) -> set[str] | None:
    """Return the settings of the method that `overrides` choose; None if they choose none that exists."""
    from conf.compose import compose
    from conf.schema import settings_class

    try:
        chosen = compose([o for o in overrides if o.startswith("method=")])["method"]
        return set(settings_class("method", str(chosen.get("module", chosen["name"]))).model_fields)
    except ConfigError:
        return None


def _faults(overrides: list[str]) -> list[str]:
    from conf.schema import load

    try:
        load([o for o in overrides if not o.startswith("hydra")])
    except ConfigError as error:
        return error.faults
    return []


def _jobs(overrides: list[str]) -> list[list[str]]:
    """Return the override lists of all jobs of a sweep, at most ``MOST_JOBS``."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ConfigError(f"{' '.join(str(error).split())[:300]}. See fedcross --help.") from error
    choices = []
    for one in parsed:
        if one.is_sweep_override():
            name = (one.input_line or "").split("=")[0]
            choices.append([f"{name}={value}" for value in one.sweep_string_iterator()])
        else:
            choices.append([one.input_line or ""])
    return [list(job) for job in itertools.islice(itertools.product(*choices), MOST_JOBS)]


def _saved(overrides: list[str]) -> list[str]:
    """Return the overrides of the run that ``resume=`` names."""
    named = [o.removeprefix("resume=") for o in overrides if o.startswith("resume=")]
    if not named or named[-1] in ("null", ""):
        return []
    folder = Path(named[-1].strip("'\""))
    path = folder / ".hydra" / "overrides.yaml"
    if not folder.is_dir():
        raise ConfigError(f"resume={folder}: no such run folder. Name the folder of a run.")
    try:
        from omegaconf import OmegaConf

        return [str(o) for o in OmegaConf.load(path) if not str(o).startswith(("resume=", "hydra."))]
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error}). This folder is not a run's folder.") from error
