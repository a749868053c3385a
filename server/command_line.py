"""Reads and checks a command line before Hydra starts a job: every job of a sweep, all errors in one message."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.events import say
from fedcross.server.sweep import Plan, plan

#: Flags of Hydra, and ``--cost``, which is fedcross's own.
FLAGS = frozenset(
    {
        *("-m", "--multirun", "--run", "-r", "--cfg", "-c", "--resolve", "--package", "-p", "--info", "-i"),
        *("--help", "-h", "--hydra-help", "--version", "--shell-completion", "-sc", "--config-path", "-cp"),
        *("--config-name", "-cn", "--config-dir", "-cd", "--experimental-rerun", "--cost"),
    }
)
#: Subcommand -> the module with its ``main(arguments)``.
SUBCOMMANDS = {
    name: f"fedcross.server.commands.{name.replace('-', '_')}"
    for name in ("report", "export", "analyse", "partition", "record", "audit", "doctor", "deploy", "new-method")
}
#: How many jobs of a sweep are checked first (jobs that differ in the seed count once); the others when they start.
MOST_JOBS = 64


def checked_plan(arguments: Sequence[str]) -> Plan:
    """Return the plan of what `arguments` would run; a ConfigError lists all errors of all jobs."""
    found = read_plan(arguments)
    check_plan(found)
    return found


def read_plan(arguments: Sequence[str]) -> Plan:
    """Return the plan of what `arguments` would run; its jobs are not checked yet.

    Short names of settings are replaced and printed. The overrides of a resumed run come first.
    """
    from fedcross.conf.shorthand import full_names

    flags = [a for a in arguments if a.startswith("-")]
    typed = [a for a in arguments if not a.startswith("-")]
    shows = {"--cfg", "-c", "--info", "-i"} & set(flags)
    if faults := [*_unknown_flags(flags), *([] if shows else _no_settings(typed))]:
        raise ConfigError(faults)
    given = full_names(typed)
    if short := [f"{a.partition('=')[0]} is {b.partition('=')[0]}" for a, b in zip(typed, given) if a != b]:
        say(", ".join(short))
    saved = _saved(given)
    # A job of an experiment that is a sweep is resumed alone.
    alone = ["hydra.mode=RUN"] if saved and not {"-m", "--multirun"} & set(flags) else []
    return plan(flags, [*saved, *alone, *given])


def check_plan(found: Plan) -> None:
    """Raise a ConfigError with every fault of every job."""
    faults: list[str] = []
    distinct = dict.fromkeys(tuple(o for o in job if not _plain_seed(o, found)) for job in found.jobs)
    for job in list(distinct)[:MOST_JOBS]:
        faults += [fault for fault in _faults(job) if fault not in faults]
    faults += [f"{name}: nothing that this sweep chooses has this setting." for name in found.unused]
    if found.multirun:
        faults += _shared_folders(found)
        faults += [
            f"{name}=...: each run of a sweep has its own folder. Set hydra.sweep.dir=DIR, also to continue a sweep."
            for name in ("output", "resume")
            if any(o.startswith(f"{name}=") for o in found.overrides)
        ]
    if faults:
        raise ConfigError(faults)


def check_job(overrides: Sequence[str]) -> None:
    """Raise a ConfigError with every fault of the single run that `overrides` describe."""
    if faults := _faults(overrides):
        raise ConfigError(faults)


def _shared_folders(found: Plan) -> list[str]:
    """Return a fault for every swept setting that does not name a job's folder, because it leaves the result alone."""
    from fedcross.server.identity import FREE, PATHS, RULES
    from fedcross.server.sweep import choices

    named = {f"federation.{rule}" for rule in RULES} | {"output", "resume", "engine"}
    return [
        f"{name}=...: runs that differ only in {name} would share one folder. Start a sweep for each value, each with "
        "its own hydra.sweep.dir=DIR."
        for name, values in choices(found.overrides).items()
        if len(values) > 1 and (name.split(".")[0] in FREE or name in PATHS) and name not in named
    ]


def _unknown_flags(flags: Sequence[str]) -> list[str]:
    """Return a fault for every argument with dashes that neither Hydra nor fedcross knows."""
    faults = []
    for flag in flags:
        name, _, value = flag.partition("=")
        if name not in FLAGS:
            setting = f"{name.lstrip('-').replace('-', '_')}={value or 'VALUE'}"
            faults.append(f"{flag}: a setting has no dashes. Write {setting}. fedcross --help lists settings.")
    return faults


def _no_settings(given: Sequence[str]) -> list[str]:
    """Return a fault for every argument that is no ``NAME=VALUE``."""
    faults = []
    for argument in given:
        name, equals, value = argument.partition("=")
        if not equals and not argument.startswith("~"):
            faults.append(f"{argument}: not a setting. Write NAME=VALUE, such as rounds=5; quote a value with spaces.")
        elif equals and not name:
            faults.append(f"{argument}: a setting needs a name. Write NAME=VALUE, such as rounds=5.")
        elif name == "resume" and value in ("", "''", '""'):
            faults.append("resume=: no folder is named. Name the folder of a run.")
        elif equals and value.startswith("~"):
            full = Path(value).expanduser()
            faults.append(f"{argument}: Hydra does not know ~. Write the full path: {name}={full}.")
    return faults


def _plain_seed(override: str, found: Plan) -> bool:
    """Return whether `override` is one of a sweep's seeds that needs no check."""
    used = any("${seed}" in one for one in found.overrides)
    return found.multirun and override.startswith("seed=") and override.removeprefix("seed=").isdigit() and not used


def _faults(overrides: Sequence[str]) -> list[str]:
    """Return all errors of a job. After a misspelled name the other settings are checked too."""
    from fedcross.conf.compose import UnknownSettingError, compose, is_hydras
    from fedcross.conf.schema import load, parsed
    from fedcross.server.run_paths import check_events

    rest = [o for o in overrides if not is_hydras(o)]
    try:
        check_events(load(rest))
        return []
    except UnknownSettingError as error:
        found: ConfigError = error
    except ConfigError as error:
        return error.faults
    except StorageError as error:
        return [str(error)]
    faults: list[str] = []
    while isinstance(found, UnknownSettingError):
        name = found.name
        command = f"{name}=: no setting, but a subcommand. See fedcross {name} --help."
        faults += [command] if name in SUBCOMMANDS else found.faults
        remaining = [o for o in rest if o.lstrip("+~").partition("=")[0] != name]
        if len(remaining) == len(rest):
            return faults
        rest = remaining
        try:
            return [*faults, *parsed(compose(rest))[1]]
        except ConfigError as error:
            found = error
    return [*faults, *found.faults]


def _saved(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of the run that ``resume=`` names."""
    from fedcross.server.run_folder import saved_overrides
    from fedcross.server.run_paths import with_paths

    named = [o.removeprefix("resume=") for o in overrides if o.startswith("resume=")]
    if not named or named[-1] == "null":
        return []
    folder = Path(named[-1].strip("'\""))
    if not folder.is_dir():
        raise ConfigError(f"resume={folder}: no such run folder. Name the folder of a run.")
    saved = [one for one in saved_overrides(folder) if not one.startswith(("resume=", "hydra."))]
    return with_paths(folder, _without_engine(saved, overrides), overrides)


def _without_engine(saved: list[str], given: Sequence[str]) -> list[str]:
    """Return `saved` without settings that the engine which `given` chooses does not have."""
    from fedcross.conf.compose import compose

    chosen = [one for one in given if one.startswith("engine=")]
    own = [one for one in saved if one.lstrip("+").startswith("engine.")]
    if not chosen or not own:
        return saved
    known = compose(chosen[-1:])["engine"]
    return [one for one in saved if one not in own or one.lstrip("+").split("=")[0].split(".")[1] in known]
