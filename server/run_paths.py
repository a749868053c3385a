"""Paths outside a run's folder: data, the certificate of ``engine=remote``, the visits that a replay repeats.

They are recorded as absolute paths in ``.hydra/places.json``, beside the settings, so that a copied folder can be
resumed on another machine.
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
from fedcross.server.run_folder import writing

if TYPE_CHECKING:
    from fedcross.conf.schema import RunConfig

#: File in a run's folder.
FILE = Path(".hydra") / "places.json"
DATA, ROOT, AUTHORITY, EVENTS = "data_root", "task.root", "engine.authority", "clock.events"


def name_of(override: str) -> str:
    """Return the setting that `override` changes."""
    return override.lstrip("+").partition("=")[0]


def paths_of(config: RunConfig, overrides: Sequence[str]) -> dict[str, str]:
    """Return the absolute paths of a run by their settings; the task's own folder only if `overrides` name one.

    With ``engine.authority``, on a network, the task's folder is one on every device and stays as it is.
    """
    authority = getattr(config.engine, "authority", None)
    root = getattr(config.task, "root", None) if authority is None and ROOT in map(name_of, overrides) else None
    found = {DATA: config.data_root, ROOT: root, AUTHORITY: authority, EVENTS: config.clock.events}
    return {name: str(Path(path).expanduser().resolve()) for name, path in found.items() if path is not None}


def write(folder: Path, paths: dict[str, str]) -> None:
    """Record `paths` in the run's folder."""
    with writing(folder / FILE):
        write_atomically(folder / FILE, json.dumps(paths, indent=1).encode())


def with_paths(folder: Path, saved: Sequence[str], given: Sequence[str] = ()) -> list[str]:
    """Return the settings `saved` of the run in `folder` with its recorded paths.

    Paths that `given` names are left out, and the data folder where ``FEDCROSS_DATA`` is set.
    """
    named = set(map(name_of, given)) | ({DATA} if os.environ.get("FEDCROSS_DATA") else set())
    if next((o for o in reversed([*saved, *given]) if name_of(o) == "engine"), None) != "engine=remote":
        named.add(AUTHORITY)
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8")) if (folder / FILE).exists() else {}
        paths = {name: str(found[name]) for name in (DATA, ROOT, AUTHORITY, EVENTS) if name in found.keys() - named}
    except (OSError, ValueError, AttributeError) as error:
        raise StorageError(f"{folder / FILE}: cannot be read ({error}). Remove it and give data_root=.") from error
    kept = [one for one in saved if name_of(one) not in paths]
    return [*kept, *(f"{name}={quote(path)}" for name, path in paths.items())]


def check_events(config: RunConfig) -> None:
    """Raise a ConfigError if the record of visits of a replay has fewer visits, slots or clients than the run needs."""
    from fedcross.strategies.round.clock import ReplayClock

    if config.clock.events is None:
        return
    visits, per_round = ReplayClock.read(Path(config.clock.events)).events, config.clients_per_round
    clients = getattr(config.partition, "clients", None) or 1 << 31
    most = {"slot": per_round, "client": clients}
    too_high = [name for name, limit in most.items() if max(visit.get(name, 0) for visit in visits.values()) >= limit]
    if too_high or len(visits) < min(config.rounds, config.stop_at or config.rounds) * per_round:
        raise ConfigError(
            f"{EVENTS}={config.clock.events}: its {len(visits)} visits are of a run with other rounds, "
            "clients_per_round or partition.clients. Give those of the recorded run."
        )


def moved_data(config: RunConfig, fault: DataError) -> DataError:
    """Return `fault` of reading a resumed run's data; if their folder is missing, with the setting that names it."""
    folder = Path(getattr(config.task, "root", config.data_root))
    if folder.is_dir():
        return fault
    name = DATA if folder == Path(config.data_root) else ROOT
    return DataError(f"{folder}: the folder of this run's data is missing here. Name it: {name}=DIR. ({fault})")
