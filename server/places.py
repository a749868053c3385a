"""Where a run found what lies outside its folder: its data, the authority's certificate of ``engine=remote``, and the
visits that a replay repeats.

They are recorded as absolute paths beside the run's settings, because a relative path says nothing in another folder.
The settings themselves name no place of this machine, so that a run's folder can be copied to another one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedcross.core.errors import ConfigError, DataError, StorageError
from fedcross.core.overrides import quote
from fedcross.core.private_files import write_atomically

if TYPE_CHECKING:
    from fedcross.conf.schema import RunConfig

#: File in a run's folder.
FILE = Path(".hydra") / "places.json"
DATA, ROOT, AUTHORITY, EVENTS = "data_root", "task.root", "engine.authority", "clock.events"
VARIABLE = "FEDCROSS_DATA"


def name_of(override: str) -> str:
    """Return the setting that `override` changes."""
    return override.lstrip("+").partition("=")[0]


def of(config: RunConfig, overrides: Sequence[str]) -> dict[str, str]:
    """Return the places of a run by the names of their settings; the task's own folder only if `overrides` name one.

    With ``engine.authority``, on a network, the task's folder holds on every machine, and stays as it is.
    """
    found = {DATA: Path(config.data_root)}
    root, authority = getattr(config.task, "root", None), getattr(config.engine, "authority", None)
    if authority is not None:
        found[AUTHORITY] = Path(authority)
    elif root is not None and ROOT in map(name_of, overrides):
        found[ROOT] = Path(root)
    if config.clock.events is not None:
        found[EVENTS] = Path(config.clock.events)
    return {name: str(path.expanduser().resolve()) for name, path in found.items()}


def write(folder: Path, places: dict[str, str]) -> None:
    """Record `places` in the run's folder.

    Raises
    ------
    StorageError
        If they cannot be written.
    """
    try:
        write_atomically(folder / FILE, json.dumps(places, indent=1).encode())
    except OSError as error:
        raise StorageError(f"output={folder}: cannot be written ({error}). Choose another folder.") from error


def added(folder: Path, saved: Sequence[str], given: Sequence[str] = ()) -> list[str]:
    """Return the settings `saved` of the run in `folder` with its recorded places.

    What `given` names is left to it, and the folder of data to the environment variable ``FEDCROSS_DATA``, where
    that is set: a run that was copied finds its data elsewhere.
    """
    named = set(map(name_of, given)) | ({DATA} if os.environ.get(VARIABLE) else set())
    engine = next((o.partition("=")[2] for o in reversed([*saved, *given]) if name_of(o) == "engine"), None)
    places = {name: path for name, path in _recorded(folder).items() if name not in named}
    if engine != "remote":
        places.pop(AUTHORITY, None)
    kept = [one for one in saved if name_of(one) not in places]
    return [*kept, *(f"{name}={quote(path)}" for name, path in places.items())]


def _recorded(folder: Path) -> dict[str, str]:
    """Return what :func:`write` recorded; nothing for a run of an older version."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StorageError(f"{folder / FILE}: cannot be read ({error}). Remove it and give data_root=.") from error
    known = (DATA, ROOT, AUTHORITY, EVENTS)
    return {name: str(found[name]) for name in known if name in found} if isinstance(found, dict) else {}


def check_record(config: RunConfig) -> None:
    """Refuse a record of visits that cannot be repeated, or has fewer of them than the run makes.

    Raises
    ------
    ConfigError
        If there are too few, or more slots or clients than the run has.
    StorageError
        If it cannot be read; with the cure, if it is missing and a resumed run has named it.
    """
    from fedcross.strategies.round.clock import ReplayClock

    if config.clock.events is None:
        return
    path = Path(config.clock.events)
    try:
        record = ReplayClock.read(path).events
    except StorageError as error:
        if config.resume is None or path.exists():
            raise
        raise StorageError(f"{error} If it was moved, add {EVENTS}=FILE (the same file).") from error
    rounds = min(config.rounds, config.stop_at or config.rounds)
    for name, setting, most in (
        ("slot", "clients_per_round", config.clients_per_round),
        ("client", "partition.clients", getattr(config.partition, "clients", None)),
    ):
        highest = max(visit.get(name, 0) for visit in record.values())
        if isinstance(most, int) and highest >= most:
            raise ConfigError(f"{EVENTS}={path}: {name} {highest} is in it, and {setting}={most}. Give the run's own.")
    if len(record) < (needed := rounds * config.clients_per_round):
        raise ConfigError(
            f"{EVENTS}={path}: {len(record)} visits are in it, and {rounds} rounds with "
            f"clients_per_round={config.clients_per_round} make {needed}. Lower them to those of the recorded run; if "
            "they are, lines of the record are missing."
        )


def elsewhere(config: RunConfig, fault: DataError) -> DataError:
    """Return `fault` of reading the data of a resumed run; with the cure, if their folder is missing."""
    folder = Path(getattr(config.task, "root", config.data_root))
    if folder.is_dir():
        return fault
    name = DATA if folder == Path(config.data_root) else ROOT
    return DataError(f"{folder}: the folder of this run's data is missing here. Say where it is: {name}=DIR. ({fault})")
