"""Reads and checks a command line before Hydra starts a job: every job of a sweep, all errors in one message."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fedcross.conf.compose import UnknownSettingError, compose, composed, is_hydras, resolved
from fedcross.conf.schema import load
from fedcross.conf.shorthand import full_names
from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.events import become_json, say
from fedcross.server import SUBCOMMANDS as SUBCOMMANDS
from fedcross.server.announce import announce
from fedcross.server.identity import FREE, PATHS, RULES
from fedcross.server.launch import check_events, launch
from fedcross.server.run_folder import saved_overrides, unused
from fedcross.server.sweep import Plan, choices, plan

#: Flags of Hydra, and ``--cost``, which is fedcross's own.
FLAGS = {
    *("-m", "--multirun", "--run", "-r", "--cfg", "-c", "--resolve", "--package", "-p", "--info", "-i", "--help", "-h"),
    *("--hydra-help", "--version", "--shell-completion", "-sc", "--config-path", "-cp", "--config-name", "-cn"),
    *("--config-dir", "-cd", "--experimental-rerun", "--cost"),
}
#: How many jobs of a sweep are checked first (jobs that differ in the seed count once); the others when they start.
MOST_JOBS = 64


def checked_plan(arguments: Sequence[str]) -> Plan:
    """Return the plan of what `arguments` would run; a ConfigError lists all errors of all jobs."""
    found = read_plan(arguments)
    check_plan(found)
    return found


def read_plan(arguments: Sequence[str]) -> Plan:
    """Return the plan of what `arguments` would run, not checked yet; the overrides of a resumed run come first."""
    flags = [a for a in arguments if a.startswith("-")]
    typed = [a for a in arguments if not a.startswith("-")]
    faults = []
    for flag in (one for one in flags if one.partition("=")[0] not in FLAGS):
        name, _, value = flag.lstrip("-").partition("=")
        setting = f"{name.replace('-', '_')}={value or 'VALUE'}"
        faults.append(f"{flag}: a setting has no dashes. Write {setting}. fedcross --help lists settings.")
    if not {"--cfg", "-c", "--info", "-i"} & set(flags):
        faults += [fault for one in typed if (fault := _no_setting(one))]
    if faults:
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
    alike = found.multirun and "${seed}" not in " ".join(found.overrides)  # jobs that differ in the seed alone
    seed = re.compile(r"seed=\d+")
    distinct = dict.fromkeys(tuple(o for o in job if not (alike and seed.fullmatch(o))) for job in found.jobs)
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


def _shared_folders(found: Plan) -> list[str]:
    """Return a fault for every swept setting that does not name a job's folder, because it leaves the result alone."""
    named = {f"federation.{rule}" for rule in RULES} | {"output", "resume", "engine"}
    return [
        f"{name}=...: runs that differ only in {name} would share one folder. Start a sweep for each value, each with "
        "its own hydra.sweep.dir=DIR."
        for name, values in choices(found.overrides).items()
        if len(values) > 1 and (name.split(".")[0] in FREE or name in PATHS) and name not in named
    ]


def _no_setting(argument: str) -> str | None:
    """Return why `argument` is no setting that can be used."""
    name, equals, value = argument.partition("=")
    if not equals and not argument.startswith("~"):
        return f"{argument}: not a setting. Write NAME=VALUE, such as rounds=5; quote a value with spaces."
    if equals and not name:
        return f"{argument}: a setting needs a name. Write NAME=VALUE, such as rounds=5."
    if name == "resume" and value in ("", "''", '""'):
        return "resume=: no folder is named. Name the folder of a run."
    if value.startswith("~"):
        return f"{argument}: Hydra does not know ~. Write the full path: {name}={Path(value).expanduser()}."
    return None


def _faults(overrides: Sequence[str]) -> list[str]:
    """Return all errors of a job. After a misspelled name the other settings are checked too."""
    rest = [o for o in overrides if not is_hydras(o)]
    try:
        check_events(load(rest))
    except UnknownSettingError as error:
        command = f"{error.name}=: no setting, but a subcommand. See fedcross {error.name} --help."
        faults = [command] if error.name in SUBCOMMANDS else error.faults
        others = [o for o in rest if o.lstrip("+~").partition("=")[0] != error.name]
        return [*faults, *(_faults(others) if len(others) < len(rest) else [])]
    except ConfigError as error:
        return error.faults
    except StorageError as error:
        return [str(error)]
    return []


def _saved(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of the run that ``resume=`` names, without settings that another ``engine=`` lacks."""
    named = [o.removeprefix("resume=") for o in overrides if o.startswith("resume=")]
    if not named or named[-1] == "null":
        return []
    folder = Path(named[-1].strip("'\""))
    if not folder.is_dir():
        raise ConfigError(f"resume={folder}: no such run folder. Name the folder of a run.")
    saved = [one for one in saved_overrides(folder) if not one.startswith(("resume=", "hydra."))]
    if engine := [one for one in overrides if one.startswith("engine=")][-1:]:
        known = {f"engine.{name}" for name in compose(engine)["engine"]} | {"engine"}
        names = {one: one.lstrip("+").partition("=")[0] for one in saved}
        return [one for one, name in names.items() if not name.startswith("engine") or name in known]
    return saved


def single(overrides: Sequence[str]) -> Path:
    """Print what `overrides` run, check it and run it, without Hydra's ``main``; return the run's folder."""
    with suppress(ConfigError):  # the check names the faults
        if composed(overrides).log.format == "json":  # also where the resumed run says so
            become_json()
    if faults := _faults(overrides):
        raise ConfigError(faults)
    announce(overrides)
    folder = folder_for(overrides)
    if not any(o.startswith(("hydra.run.dir=", "output=", "resume=")) for o in overrides):
        folder = unused(folder)
    return launch([o for o in overrides if not is_hydras(o)], folder)


def folder_for(overrides: Sequence[str]) -> Path:
    """Return the folder that `overrides` name for a run, or Hydra's default one."""
    resume, output, default = resolved(composed(overrides), "resume", "output", "hydra.run.dir")
    return Path(str(resume or output or default)).resolve()
