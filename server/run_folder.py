"""Run folders: one run per folder, protected by locks, with the settings and paths of the run.

Two processes hold a lock each: the command (:func:`claimed`) and the server that writes the run's files
(:func:`written`). A local run is one process; on a SuperLink the server goes on when the command ends.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from fedcross.core.errors import ConfigError, StorageError, counted, quoted, remedy
from fedcross.core.events import say
from fedcross.core.overrides import shown
from fedcross.core.private_files import close_own, own_folder

if TYPE_CHECKING:
    from fedcross.conf.schema import RunConfig

#: Lock files of the command and of the server.
LOCK, SERVER_LOCK = ".lock", ".server.lock"
#: Seconds for which a server waits for the previous one: a SuperLink notices a dead one in a minute.
ENDS_S = 90.0
#: Files that only a run writes.
TRACES = ("metrics.jsonl", "audit.jsonl", "result.json", "model.safetensors", "checkpoints/round-*")

#: Files that a resumed run writes on in place, and those that it replaces.
IN_PLACE = ("digests.jsonl", "checkpoints/accepted.log")
REPLACED = (*TRACES, ".hydra/config.yaml", ".hydra/overrides.yaml", ".hydra/places.json")


class FolderInUseError(ConfigError):
    """Another process runs in this folder."""


@contextmanager
def writing(path: Path, cure: str = "then resume") -> Iterator[None]:
    """Turn an OSError inside the block, which writes a run's file, into a StorageError with advice."""
    try:
        yield
    except OSError as error:
        fault = f"{path}: cannot be written ({error}). To go on: {remedy(error)}, {cure}."
        raise StorageError(fault) from error


def prepare(folder: Path) -> Path:
    """Create `folder` for this user only and return it; a StorageError if it cannot be written."""
    try:
        if not folder.exists():
            own_folder(folder)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StorageError(f"output={folder}: cannot be written ({error}). Choose another folder.") from error
    return folder


def saved_overrides(folder: Path) -> list[str]:
    """Return the settings with which the run in `folder` was started; a StorageError if it has none."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    path = folder / ".hydra" / "overrides.yaml"
    if not path.exists():
        raise StorageError(f"{folder}: this folder holds no run. Name the folder of a run.")
    try:
        found = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        if not isinstance(found, list):
            raise TypeError("not a list of settings")
        return [str(one) for one in found]
    except (OSError, ValueError, TypeError, YAMLError, OmegaConfBaseException) as error:
        raise StorageError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]}).") from error


@contextmanager
def claimed(folder: Path) -> Iterator[Path]:
    """Lock `folder` for this command inside the block; a FolderInUseError if another command has locked it."""
    with _locked(folder, LOCK, 0.0, "Wait until it ends, or choose another output=."):
        yield folder


@contextmanager
def written(folder: Path, wait_s: float = ENDS_S) -> Iterator[None]:
    """Keep other servers from writing into `folder` inside the block; wait `wait_s` seconds for one that is ending."""
    advice = "fedcross deploy runs shows a run on a SuperLink, fedcross deploy stop RUN ends it."
    with _locked(folder, SERVER_LOCK, wait_s, advice):
        yield


@contextmanager
def _locked(folder: Path, name: str, wait_s: float, advice: str) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(prepare(folder) / name)
    try:
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            if wait_s:
                say(f"{folder}: another server writes here. Waiting up to {wait_s:.0f} s for its end.", "WARNING")
            held = lock.acquire(timeout=wait_s)
    except Timeout as error:
        raise FolderInUseError(f"{folder}: another run works in this folder. {advice}") from error
    except OSError as error:
        raise StorageError(f"output={folder}: cannot be written ({error}). Choose another folder.") from error
    with held:
        close_own(folder / name)
        yield


def refuse_used(folder: Path) -> None:
    """Raise a ConfigError if `folder` holds a run or the runs of a sweep; the message says how to go on."""
    if used(folder):
        if any(folder.glob("checkpoints/round-*.safetensors")):
            cure = f"Continue it with resume={shown(folder)}, or choose another output=."
        else:
            cure = "It has no checkpoint to continue from. Choose another output=, or delete the folder."
        raise ConfigError(f"output={folder}: it already holds a run ({progress_of(folder)}). {cure}")
    if inside := next((one.parent for one in folder.glob("*/result.json")), None):
        raise ConfigError(f"output={folder}: it holds the run {inside.name}. Choose another output=.")


def refuse_blocked(folder: Path) -> None:
    """Raise a StorageError if a link or a folder is where a resumed run writes a file: it would fail half-way."""
    links = [path for path in (folder / name for name in IN_PLACE) if path.is_symlink()]
    found = (path for name in (*IN_PLACE, *REPLACED) for path in folder.glob(name))
    for path in [*links, *(path for path in found if path.is_dir() and not path.is_symlink())]:
        raise StorageError(
            f"{path}: the run writes a file here. Move the link or folder of that name away, then resume."
        )


def start_again(folder: Path) -> str:
    """Return how the run in `folder`, which cannot go on, is started again."""
    if (folder.parent / "multirun.yaml").exists():
        return f"remove {quoted(folder)} and start the sweep again"
    return "start again in another folder"


def used(folder: Path) -> bool:
    """Return whether a run has written into `folder`."""
    return any(next(folder.glob(name), None) for name in TRACES)


def progress_of(folder: Path) -> str:
    """Return a short text on the run in `folder` and its progress."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return f"{found['method']} {found['task']} seed {found['seed']}, finished, {counted(found['rounds'], 'round')}"
    rounds = 0
    with suppress(OSError):
        rounds = len((folder / "metrics.jsonl").read_bytes().splitlines())
    return f"not finished, {counted(rounds, 'round')}"


def unused(folder: Path) -> Path:
    """Return `folder`, or the first of ``folder-2``, ``folder-3``... without a run: two may start in one second."""
    names = (folder if i == 1 else folder.with_name(f"{folder.name}-{i}") for i in count(1))
    return next(name for name in names if not used(name) and not (name / LOCK).exists())


def folder_of(config: RunConfig) -> Path:
    """Return the folder of a run: the one that its settings name, or a new one (``flwr run``)."""
    new = f"{time.strftime('outputs/%Y-%m-%d/%H-%M-%S')}-{config.names['method']}-{config.names['task']}"
    return Path(config.resume or config.output or unused(Path(new))).resolve()
