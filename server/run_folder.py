"""Run folders: one run per folder, protected by locks, with the settings and the files of the run.

Two processes hold a lock each: the command (:func:`claimed`) and the server that writes the run's files
(:func:`written`). A local run is one process; on a SuperLink the server goes on when the command ends.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fedcross.conf.schema import RunConfig
from fedcross.core.errors import ConfigError, StorageError, counted, quoted, remedy
from fedcross.core.events import say
from fedcross.core.files import PART, close_own, open_own, own_folder, write_atomically
from fedcross.core.settings import shown

#: Lock files of the command and of the server.
LOCK, SERVER_LOCK = ".lock", ".server.lock"
#: Seconds for which a server waits for the previous one: a SuperLink notices a dead one in a minute.
ENDS_S = 90.0
#: Files that only a run writes.
TRACES = ("metrics.jsonl", "audit.jsonl", "result.json", "model.safetensors", "checkpoints/round-*")


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


class Lines:
    """A file of lines that a run writes, such as ``metrics.jsonl``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def read(self) -> list[str]:
        """Return the lines on disk, without a last one that a crash has cut off."""
        with writing(self.path):
            return self.path.read_bytes().decode(errors="replace").split("\n")[:-1] if self.path.exists() else []

    def start(self, kept: Iterable[str] = ()) -> None:
        """Replace the file by the lines `kept` of earlier processes, and open it."""
        with writing(self.path):
            write_atomically(self.path, "".join(f"{line}\n" for line in kept).encode())
            self._file = open_own(self.path, "a")

    def add(self, *lines: str, durable: bool = True) -> None:
        """Append `lines`; they are on disk (fsync) when this returns, unless `durable` is false."""
        if self._file is None:
            self.start()
        assert self._file is not None  # noqa: S101
        with writing(self.path):
            self._file.write("".join(f"{line}\n" for line in lines))
            self._file.flush()
            if durable:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with suppress(OSError):  # on a full disk, an earlier call has raised the error
                self._file.close()


def prepare(folder: Path) -> Path:
    """Create `folder` for this user only, if it is missing, and return it; a StorageError if that fails."""
    with writing(folder, "or choose another output="):
        if not folder.exists():
            own_folder(folder)
    return folder


def saved_overrides(folder: Path) -> list[str]:
    """Return the run's settings, without ``data_root`` if ``FEDCROSS_DATA`` names it; a StorageError if it has none."""
    from yaml import YAMLError

    path = folder / ".hydra" / "overrides.yaml"
    if not path.exists():
        raise StorageError(f"{folder}: this folder holds no run. Name the folder of a run.")
    try:
        found = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        if not isinstance(found, list):
            raise TypeError("not a list of settings")
    except (OSError, ValueError, TypeError, YAMLError, OmegaConfBaseException) as error:
        raise StorageError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]}).") from error
    elsewhere = bool(os.environ.get("FEDCROSS_DATA"))
    return [str(one) for one in found if not (elsewhere and str(one).startswith("data_root="))]


def claimed(folder: Path) -> AbstractContextManager[None]:
    """Lock `folder` for this command inside the block; a FolderInUseError if another command has locked it."""
    return _locked(folder, LOCK, 0.0, "Wait until it ends, or choose another output=.")


def written(folder: Path, wait_s: float = ENDS_S) -> AbstractContextManager[None]:
    """Keep other servers from writing into `folder` inside the block; wait `wait_s` seconds for one that is ending."""
    advice = "fedcross deploy status shows a run on a SuperLink, fedcross deploy stop RUN ends it."
    return _locked(folder, SERVER_LOCK, wait_s, advice)


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
        cure = f"Continue it with resume={shown(folder)}, or choose another output=."
        if not any(folder.glob("checkpoints/round-*.safetensors")):
            cure = "It has no checkpoint to continue from. Choose another output=, or delete the folder."
        raise ConfigError(f"output={folder}: it already holds a run ({progress_of(folder)}). {cure}")
    if inside := next((one.parent for one in folder.glob("*/result.json")), None):
        raise ConfigError(f"output={folder}: it holds the run {inside.name}. Choose another output=.")


def start_again(folder: Path) -> str:
    """Return how the run in `folder`, which cannot go on, is started again."""
    swept = (folder.parent / "multirun.yaml").exists()
    return f"remove {quoted(folder)} and start the sweep again" if swept else "start again in another folder"


def used(folder: Path) -> bool:
    """Return whether a run has written a checkpoint, a round or a result into `folder`; traces of less do not count."""
    found = (path for name in TRACES for path in folder.glob(name))
    return any(path.suffix != PART and path.name != "audit.jsonl" and path.lstat().st_size for path in found)


def progress_of(folder: Path) -> str:
    """Return a short text on the run in `folder` and its progress."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return f"{found['method']} {found['task']} seed {found['seed']}, finished, {counted(found['rounds'], 'round')}"
    return f"not finished, {counted(len(Lines(folder / 'metrics.jsonl').read()), 'round')}"


def unused(folder: Path) -> Path:
    """Return `folder`, or the first of ``folder-2``, ``folder-3``... that does not exist: two may start in a second."""
    names = (folder if i == 1 else folder.with_name(f"{folder.name}-{i}") for i in count(1))
    return next(name for name in names if not name.exists())


def folder_of(config: RunConfig) -> Path:
    """Return the folder of a run: the one that its settings name, or a new one (``flwr run``)."""
    new = f"{time.strftime('outputs/%Y-%m-%d/%H-%M-%S')}-{config.names['method']}-{config.names['task']}"
    return Path(config.resume or config.output or unused(Path(new))).resolve()
