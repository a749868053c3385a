"""A run folder belongs to one run: locked while it lasts, refused to any other, recorded when it really starts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from fedcross.core.errors import ConfigError, StorageError

#: Held by the process that runs in the folder.
LOCK = ".lock"
#: What only a run writes: a folder with one of these is used.
TRACES = ("metrics.jsonl", "result.json", "model.safetensors", "checkpoints")


class FolderInUseError(ConfigError):
    """Another process runs in this folder."""


def prepare(folder: Path) -> Path:
    """Return `folder`, made if it is not there.

    Raises
    ------
    StorageError
        If nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StorageError(f"output={folder}: cannot be written ({error}). Choose another folder.") from error
    return folder


@contextmanager
def claimed(folder: Path) -> Iterator[Path]:
    """Hold `folder` for this process while the block lasts.

    Raises
    ------
    FolderInUseError
        If another process holds it.
    StorageError
        If it cannot be written.
    """
    from filelock import FileLock, Timeout

    prepare(folder)
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        held = lock.acquire()
    except Timeout as error:
        raise FolderInUseError(
            f"{folder}: another process runs in this folder. Wait for its end, or choose another output=."
        ) from error
    except OSError as error:
        raise StorageError(f"output={folder}: cannot be written ({error}). Choose another folder.") from error
    with held:
        yield folder


def refuse_used(folder: Path) -> None:
    """Raise a ConfigError if a run lies in `folder`, with how far it came and the two ways on."""
    if not used(folder):
        return
    raise ConfigError(
        f"output={folder}: a run lies here already ({standing(folder)}). Continue it with resume={folder}, or choose "
        "another output=."
    )


def used(folder: Path) -> bool:
    """Return whether a run has written into `folder`."""
    return any((folder / name).exists() for name in TRACES)


def standing(folder: Path) -> str:
    """Return in a few words which run lies in `folder` and how far it came."""
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return f"{result['method']} {result['task']} seed {result['seed']}, finished, {result['rounds']} rounds"
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        rounds = len((folder / "metrics.jsonl").read_bytes().splitlines())
    except OSError:
        rounds = 0
    return f"not finished, {rounds} rounds"


def free(folder: Path) -> Path:
    """Return `folder`, or the first of ``folder-2``, ``folder-3``... in which no run lies.

    For folders that are named by the second in which a run starts: two of them may start in one.
    """
    names = (folder if i == 1 else folder.with_name(f"{folder.name}-{i}") for i in count(1))
    return next(name for name in names if not used(name) and not (name / LOCK).exists())


def by_time() -> Path:
    """Return the folder of a run that names none and that no command started (``flwr run``)."""
    return free(Path(time.strftime("outputs/%Y-%m-%d/%H-%M-%S")))
