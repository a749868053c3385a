"""The command line, checked before Hydra starts anything: every job of a sweep, all faults at once."""

from __future__ import annotations

import itertools
from pathlib import Path

from tasks.errors import ConfigError, StorageError

#: Jobs of a sweep that are checked beforehand; the rest are checked when they start.
MOST_JOBS = 256


def check_overrides(arguments: list[str], overrides: list[str]) -> list[str]:
    """Check what `arguments` would run and return them, with a resumed run's own overrides put in front.

    Raises
    ------
    ConfigError
        With every fault of every job.
    """
    saved = _saved(overrides)
    multirun = bool({"-m", "--multirun"} & set(arguments))
    faults: list[str] = []
    for job in _jobs([*saved, *overrides], multirun):
        faults += [fault for fault in _faults(job) if fault not in faults]
    if faults:
        raise ConfigError(faults)
    flags = [a for a in arguments if a.startswith("-")]
    return [*flags, *saved, *overrides] if saved else arguments


def _faults(overrides: list[str]) -> list[str]:
    from conf.schema import load

    try:
        load([o for o in overrides if not o.startswith("hydra")])
    except ConfigError as error:
        return error.faults
    return []


def _jobs(overrides: list[str], multirun: bool) -> list[list[str]]:
    """Return the override lists of all jobs, at most ``MOST_JOBS``."""
    if not multirun:
        return [overrides]
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
    except HydraException as error:
        raise ConfigError(f"{' '.join(str(error).split())[:300]}. See fedcross --help.") from error
    choices = [
        [f"{p.get_key_element()}={v}" for v in p.sweep_string_iterator()]
        if p.is_sweep_override()
        else [p.input_line or ""]
        for p in parsed
    ]
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
