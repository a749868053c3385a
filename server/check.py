"""Checks the command line before Hydra starts a job: every job of a sweep, all errors in one message."""

from __future__ import annotations

from pathlib import Path

from fedcross.core.errors import ConfigError
from fedcross.server.sweep import Plan, plan

#: Flags of Hydra, and ``--cost``, which is fedcross's own.
FLAGS = frozenset(
    {
        *("-m", "--multirun", "--run", "-r", "--cfg", "-c", "--resolve", "--package", "-p", "--info", "-i"),
        *("--help", "-h", "--hydra-help", "--version", "--shell-completion", "-sc", "--config-path", "-cp"),
        *("--config-name", "-cn", "--config-dir", "-cd", "--experimental-rerun", "--cost"),
    }
)
#: How many jobs of a sweep (jobs that differ in the seed count once) are checked first; the others when they start.
MOST_JOBS = 256


def check_overrides(arguments: list[str]) -> list[str]:
    """Check `arguments` and return the arguments for Hydra; see :func:`checked_plan`."""
    found = checked_plan(arguments)
    return [*found.flags, *found.overrides]


def checked_plan(arguments: list[str]) -> Plan:
    """Return the plan of what `arguments` would run, after checking every job.

    The overrides of a resumed run are put first. Of several jobs that differ only in the seed, one is checked.

    Raises
    ------
    ConfigError
        If a job has errors; the message lists all errors of all jobs.
    """
    flags = [a for a in arguments if a.startswith("-")]
    given = [a for a in arguments if not a.startswith("-")]
    if wrong := [*_unknown_flags(arguments), *_no_settings(given, flags)]:
        raise ConfigError(wrong)
    found = plan(flags, [*_saved(given), *given])
    faults: list[str] = []
    distinct = dict.fromkeys(tuple(o for o in job if not _seed(o, found)) for job in found.jobs)
    for job in list(distinct)[:MOST_JOBS]:
        faults += [fault for fault in _faults(list(job)) if fault not in faults]
    faults += [f"{name}: nothing that this sweep chooses has this setting." for name in found.unused]
    if found.multirun:
        faults += [
            f"{name}=...: each run of a sweep has its own folder. Set hydra.sweep.dir=DIR, also to continue a sweep."
            for name in ("output", "resume")
            if any(o.startswith(f"{name}=") for o in found.overrides)
        ]
    if faults:
        raise ConfigError(faults)
    return found


def _unknown_flags(arguments: list[str]) -> list[str]:
    """Return a fault for every argument with dashes that neither Hydra nor fedcross knows."""
    faults = []
    for place, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name.startswith("-") and name not in FLAGS:
            after = arguments[place + 1] if not value and place + 1 < len(arguments) else ""
            setting = f"{name.lstrip('-').replace('-', '_')}={value or after or 'VALUE'}"
            faults.append(f"{argument}: a setting has no dashes. Write {setting}. fedcross --help lists settings.")
    return faults


def _no_settings(given: list[str], flags: list[str]) -> list[str]:
    """Return a fault for every argument that is no ``NAME=VALUE``; Hydra's own words name no cure."""
    takes_value = any(flag in {"--cfg", "-c", "--info", "-i"} for flag in flags)
    faults = []
    for argument in given:
        name, equals, value = argument.partition("=")
        if not equals and not argument.startswith("~") and not takes_value:
            faults.append(f"{argument}: not a setting. Write NAME=VALUE, such as rounds=5.")
        elif equals and not name:
            faults.append(f"{argument}: a setting needs a name. Write NAME=VALUE, such as rounds=5.")
        elif name == "resume" and value in ("", "''", '""'):
            faults.append("resume=: no folder is named. Name the folder of a run.")
        elif equals and value.startswith("~"):
            faults.append(
                f"{argument}: Hydra does not know ~. Write the whole path: {name}={Path(value).expanduser()}."
            )
    return faults


def _seed(override: str, found: Plan) -> bool:
    """Return whether `override` is a seed that needs no check: one of several seeds, and a plain number."""
    return found.multirun and override.startswith("seed=") and override.removeprefix("seed=").isdigit()


def _faults(overrides: list[str]) -> list[str]:
    from fedcross.conf.schema import load

    try:
        load([o for o in overrides if not o.startswith("hydra")])
    except ConfigError as error:
        return error.faults
    return []


def _saved(overrides: list[str]) -> list[str]:
    """Return the overrides of the run that ``resume=`` names."""
    named = [o.removeprefix("resume=") for o in overrides if o.startswith("resume=")]
    if not named or named[-1] in ("null", ""):
        return []
    folder = Path(named[-1].strip("'\""))
    if not folder.is_dir():
        raise ConfigError(f"resume={folder}: no such run folder. Name the folder of a run.")
    from fedcross.server.run_folder import saved_overrides

    return [one for one in saved_overrides(folder) if not one.startswith(("resume=", "hydra."))]
