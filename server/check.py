"""Checks the command line before Hydra starts a job: every job of a sweep, all errors in one message."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedcross.core.errors import ConfigError, StorageError
from fedcross.server.sweep import Plan, plan

#: Flags of Hydra, and ``--cost``, which is fedcross's own.
FLAGS = frozenset(
    {
        *("-m", "--multirun", "--run", "-r", "--cfg", "-c", "--resolve", "--package", "-p", "--info", "-i"),
        *("--help", "-h", "--hydra-help", "--version", "--shell-completion", "-sc", "--config-path", "-cp"),
        *("--config-name", "-cn", "--config-dir", "-cd", "--experimental-rerun", "--cost"),
    }
)
#: Words that are no settings but subcommands, and how each is written; a test compares them with ``commands.main``.
COMMANDS = {
    "verify": "record verify",
    **{name: name for name in ("report", "export", "analyse", "landscape", "partition", "record", "audit", "doctor")},
    **{name: name for name in ("deploy", "new-method", "onboard")},
}
#: How many jobs of a sweep (jobs that differ in the seed count once) are checked first; the others when they start.
MOST_JOBS = 256


def checked_plan(arguments: list[str]) -> Plan:
    """Return the plan of what `arguments` would run, after checking every job.

    The overrides of a resumed run are put first. Of several jobs that differ only in the seed, one is checked.

    Raises
    ------
    ConfigError
        If a job has errors; the message lists all errors of all jobs.
    """
    found = read_plan(arguments)
    check_plan(found)
    return found


def check_job(overrides: Sequence[str]) -> None:
    """Raise a ConfigError with every fault of the single run that `overrides` describe."""
    if faults := _faults(list(overrides)):
        raise ConfigError(faults)


def read_plan(arguments: list[str]) -> Plan:
    """Return the plan of what `arguments` would run; its jobs are not checked yet."""
    flags = [a for a in arguments if a.startswith("-")]
    values = {i + 1 for i, a in enumerate(arguments) if a.startswith("-") and a not in FLAGS and _after(arguments, i)}
    given = [a for i, a in enumerate(arguments) if not a.startswith("-") and i not in values]
    if wrong := [*_unknown_flags(arguments), *_no_settings(given, flags)]:
        raise ConfigError(wrong)
    saved = _saved(given)
    # A job of an experiment that is a sweep goes on alone.
    alone = ["hydra.mode=RUN"] if saved and not {"-m", "--multirun"} & set(flags) else []
    return plan(flags, [*saved, *alone, *given])


def check_plan(found: Plan) -> None:
    """Raise a ConfigError with every fault of every job."""
    faults: list[str] = []
    distinct = dict.fromkeys(tuple(o for o in job if not _seed(o, found)) for job in found.jobs)
    for job in list(distinct)[:MOST_JOBS]:
        faults += [fault for fault in _faults(list(job)) if fault not in faults]
    faults += [f"{name}: nothing that this sweep chooses has this setting." for name in found.unused]
    if found.multirun:
        faults += _keys(found.folder) if found.folder else []
        faults += _shared_folders(found)
        faults += [
            f"{name}=...: each run of a sweep has its own folder. Set hydra.sweep.dir=DIR, also to continue a sweep."
            for name in ("output", "resume")
            if any(o.startswith(f"{name}=") for o in found.overrides)
        ]
    if faults:
        raise ConfigError(faults)


def _keys(folder: Path) -> list[str]:
    """Return the fault of a sweep's folder that is one of keys, or a server program's."""
    from fedcross.server.run_folder import refuse_keys

    try:
        refuse_keys(folder, "hydra.sweep.dir")
    except ConfigError as error:
        return error.faults
    return []


def _shared_folders(found: Plan) -> list[str]:
    """Return a fault for every swept setting that does not name a job's folder, because it leaves the result alone."""
    from fedcross.server.identity import FREE, PLACES, RULES

    named = {f"federation.{rule}" for rule in RULES}
    values: dict[str, dict[str, None]] = {}
    for job in found.jobs:
        for override in job:
            name, _, value = override.lstrip("+").partition("=")
            free = name.split(".")[0] in FREE - {"output", "resume", "engine"} or name in PLACES
            if free and name not in named:
                values.setdefault(name, {})[value] = None
    return [
        f"{name}={','.join(seen)}: runs that differ only in {name} would share one folder. Start a sweep for each "
        "value, each with its own hydra.sweep.dir=DIR."
        for name, seen in values.items()
        if len(seen) > 1
    ]


def _unknown_flags(arguments: list[str]) -> list[str]:
    """Return a fault for every argument with dashes that neither Hydra nor fedcross knows."""
    faults = []
    for place, argument in enumerate(arguments):
        name, _, value = argument.partition("=")
        if name.startswith("-") and name not in FLAGS:
            after = _after(arguments, place)
            setting = f"{name.lstrip('-').replace('-', '_')}={value or after or 'VALUE'}"
            told = f"{argument} {after}".strip()
            faults.append(f"{told}: a setting has no dashes. Write {setting}. fedcross --help lists settings.")
    return faults


def _after(arguments: list[str], place: int) -> str:
    """Return the word after a wrong flag without ``=``, if it can only be its value."""
    following = arguments[place + 1] if place + 1 < len(arguments) else ""
    alone = "=" not in arguments[place] and "=" not in following and not following.startswith(("-", "~"))
    return following if alone else ""


def _no_settings(given: list[str], flags: list[str]) -> list[str]:
    """Return a fault for every argument that is no ``NAME=VALUE``; Hydra's own words name no cure."""
    takes_value = any(flag in {"--cfg", "-c", "--info", "-i"} for flag in flags)
    faults = []
    for place, argument in enumerate(given):
        name, equals, value = argument.partition("=")
        if not equals and not argument.startswith("~") and not takes_value:
            faults.append(f"{argument}: not a setting. Write NAME=VALUE, such as rounds=5.{_cut(given, place)}")
        elif equals and not name:
            faults.append(f"{argument}: a setting needs a name. Write NAME=VALUE, such as rounds=5.")
        elif name == "resume" and value in ("", "''", '""'):
            faults.append("resume=: no folder is named. Name the folder of a run.")
        elif equals and value.startswith("~"):
            faults.append(
                f"{argument}: Hydra does not know ~. Write the whole path: {name}={Path(value).expanduser()}."
            )
    return faults


def _cut(given: list[str], place: int) -> str:
    """Return how to quote the setting of a path before this word, which a space may have cut off."""
    before = given[place - 1] if place else ""
    if not before.startswith(("output=", "resume=", "data_root=", "task.root=", "partition.file=", "hydra.")):
        return ""
    return f' If it belongs to the setting before it, quote both: "{before} {given[place]}".'


def _seed(override: str, found: Plan) -> bool:
    """Return whether `override` is a seed that needs no check: one of several seeds, and a plain number."""
    named = any("${seed}" in one for one in found.overrides)  # in the place of a record of visits, say
    return found.multirun and override.startswith("seed=") and override.removeprefix("seed=").isdigit() and not named


def _faults(overrides: list[str]) -> list[str]:
    """Return all errors of a job. After a misspelled name the other settings are checked too, each by itself."""
    from fedcross.conf.compose import UnknownSettingError, compose
    from fedcross.conf.schema import load, parsed
    from fedcross.server.places import check_record

    rest = [o for o in overrides if not o.startswith("hydra")]
    try:
        check_record(load(rest))
        return []
    except UnknownSettingError as error:
        found: ConfigError = error
    except ConfigError as error:
        return error.faults
    except StorageError as error:
        return [str(error)]
    faults: list[str] = []
    while isinstance(found, UnknownSettingError):
        faults += [_of_subcommand(found.name, overrides)] if found.name in COMMANDS else found.faults
        wrong = [o for o in rest if o.lstrip("+~").partition("=")[0] == found.name]
        rest = [o for o in rest if o not in wrong]
        try:
            return [*faults, *parsed(compose(rest))[1]]
        except ConfigError as error:
            if not wrong:
                return faults
            found = error
    return [*faults, *found.faults]


def _of_subcommand(name: str, overrides: Sequence[str]) -> str:
    """Return that `name`, which `overrides` give a value, is no setting but a subcommand."""
    command = COMMANDS[name]
    value = next((o.partition("=")[2] for o in overrides if o.lstrip("+~").partition("=")[0] == name), "")
    given = f"{name}={value}"
    return f"{given}: no such setting, but a subcommand. Write fedcross {command} {value}".rstrip() + (
        f". fedcross {command} --help lists what it takes."
    )


def _saved(overrides: list[str]) -> list[str]:
    """Return the overrides of the run that ``resume=`` names."""
    named = [o.removeprefix("resume=") for o in overrides if o.startswith("resume=")]
    if not named or named[-1] in ("null", ""):
        return []
    folder = Path(named[-1].strip("'\""))
    if not folder.is_dir():
        raise ConfigError(f"resume={folder}: no such run folder. Name the folder of a run.")
    from fedcross.server import places
    from fedcross.server.run_folder import saved_overrides

    if not (folder / ".hydra" / "overrides.yaml").exists():
        raise StorageError(f"resume={folder}: this folder holds no run. Name the folder of a run.")
    saved = [one for one in saved_overrides(folder) if not one.startswith(("resume=", "hydra."))]
    return places.added(folder, _of_engine(saved, overrides), overrides)


def _of_engine(saved: list[str], given: list[str]) -> list[str]:
    """Return `saved` without settings of its engine that another one, which `given` names, does not have."""
    from fedcross.conf.compose import compose

    chosen = [one for one in given if one.startswith("engine=")]
    own = [one.lstrip("+") for one in saved if one.lstrip("+").startswith("engine.")]
    if not chosen or not own:
        return saved
    try:
        known = compose(chosen[-1:])["engine"]
    except ConfigError:  # the run's own check says what is wrong
        return saved
    lacking = {one for one in own if one.partition("=")[0].removeprefix("engine.").partition(".")[0] not in known}
    return [one for one in saved if one.lstrip("+") not in lacking]
