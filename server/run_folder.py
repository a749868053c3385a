"""Run folders: one run per folder. The run locks its folder, and another run is refused there.

Two processes hold a lock each, which in a local run are one: the command that was typed (:func:`claimed`), and the
server that writes the run's files (:func:`written`). On a SuperLink the server goes on when the command is killed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from fedcross.core.errors import ConfigError, StorageError, counted, quoted
from fedcross.core.events import say
from fedcross.core.exposed import taken
from fedcross.core.overrides import shown
from fedcross.core.private_files import close_own, own_folder

if TYPE_CHECKING:
    from fedcross.conf.schema import RunConfig

#: Lock files: held by the command that runs in the folder, and by the process that writes the run's files.
LOCK, SERVER_LOCK = ".lock", ".server.lock"
#: Seconds for which a server waits for the one before it to end: a SuperLink notices a dead or stopped one in a minute.
ENDS_S = 90.0
#: Files that only a run writes: a folder with one of them is in use or was used.
TRACES = ("metrics.jsonl", "audit.jsonl", "result.json", "model.safetensors", "checkpoints")
#: How deep folders of runs are looked for (``multirun/DATE/TIME/JOB``), and in how many folders.
DEPTH, MOST_FOLDERS = 3, 2000


class FolderInUseError(ConfigError):
    """Another process runs in this folder."""


def prepare(folder: Path) -> Path:
    """Return `folder`; create it if it does not exist, for this user only.

    Raises
    ------
    StorageError
        If the folder cannot be written.
    """
    try:
        if not folder.exists():  # a folder that the user made keeps its mode
            own_folder(folder)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StorageError(f"output={folder}: cannot be written ({error}). Choose another folder.") from error
    return folder


def saved_overrides(folder: Path) -> list[str]:
    """Return the settings with which the run in `folder` was started.

    Raises
    ------
    StorageError
        If they cannot be read.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    path = folder / ".hydra" / "overrides.yaml"
    if not path.exists():
        raise StorageError(f"{folder}: this folder holds no run. Name the folder of a run.")
    try:
        found = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:  # a ValueError: it is not UTF-8
        reason = " ".join(str(error).split())[:200]
        raise StorageError(f"{path}: cannot be read ({reason}). This folder is not a run's folder.") from error
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise StorageError(f"{path}: not a list of settings. This folder is not a run's folder.")
    return [str(one) for one in found]


@contextmanager
def claimed(folder: Path) -> Iterator[Path]:
    """Lock `folder` for this process inside the block.

    Raises
    ------
    FolderInUseError
        If another process has locked it.
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
            f"{folder}: another process runs in this folder. Wait until it ends. A new run takes another output=."
        ) from error
    except OSError as error:
        raise StorageError(f"output={folder}: cannot be written ({error}). Choose another folder.") from error
    with held:
        close_own(folder / LOCK)
        yield folder


@contextmanager
def written(folder: Path, wait_s: float = ENDS_S) -> Iterator[None]:
    """Keep every other server's process from writing into `folder` inside the block.

    Parameters
    ----------
    folder : Path
        The run's folder; it is created if it does not exist.
    wait_s : float
        Seconds to wait for a server that may be ending.

    Raises
    ------
    ConfigError
        If `folder` is one of keys.
    FolderInUseError
        If another server still writes into it.
    StorageError
        If it cannot be written.
    """
    from filelock import FileLock, Timeout

    refuse_keys(folder)
    prepare(folder)
    lock = FileLock(folder / SERVER_LOCK, timeout=0)
    try:
        try:
            held = lock.acquire()
        except Timeout:
            if not wait_s:
                raise
            say(f"{folder}: another server writes here. Waiting for its end, {wait_s:.0f} s at most.", "WARNING")
            held = lock.acquire(timeout=wait_s)
    except Timeout as error:
        raise FolderInUseError(
            f"{folder}: the server of a run writes here, whoever watches it. fedcross deploy runs shows it, fedcross "
            "deploy stop RUN ends it within a minute. A new run takes another output=."
        ) from error
    except OSError as error:
        raise StorageError(f"output={folder}: cannot be written ({error}). Choose another folder.") from error
    with held:
        close_own(folder / SERVER_LOCK)
        yield


def refuse_used(folder: Path) -> None:
    """Raise a ConfigError if `folder` holds a run, folders of runs, or keys; the message says how to go on."""
    refuse_keys(folder)
    if not used(folder):
        if inside := run_inside(folder):
            raise ConfigError(
                f"output={folder}: it already holds a run in {inside.relative_to(folder)}, and each run has a folder "
                f"of its own. Choose another output=, for example output={shown(folder / 'NAME')}."
            )
        return
    # Names alone are looked at: whether a checkpoint can be used, the run that is continued says.
    if any(folder.glob("checkpoints/round-*.safetensors")):
        cure = f"Continue it with resume={shown(folder)}, or choose another output=."
    else:
        cure = "It cannot be continued, for it has no checkpoint. Choose another output=, or delete the folder."
    raise ConfigError(f"output={folder}: it already holds a run ({standing(folder)}). {cure}")


def refuse_keys(folder: Path, setting: str = "output") -> None:
    """Raise a ConfigError if `folder`, which `setting` names, has keys or is a server program's (:func:`taken`)."""
    if what := taken(folder):
        cure = "Move the run to a folder of its own" if setting == "resume" else f"Choose another {setting}="
        raise ConfigError(f"{setting}={folder}: {what}. {cure}.")


def anew(folder: Path) -> str:
    """Return how the run in `folder`, which cannot go on, is started again; a sweep would try this folder again."""
    if (folder.parent / "multirun.yaml").exists():
        return f"remove {quoted(folder)} and start the sweep again"
    return "start again in another folder"


def used(folder: Path) -> bool:
    """Return whether a run has written into `folder`."""
    return any((folder / name).exists() for name in TRACES)


def run_inside(folder: Path) -> Path | None:
    """Return the folder of a run up to :data:`DEPTH` levels below `folder`, None if none is found there."""
    level, seen = [folder], 0
    for _ in range(DEPTH):
        below: list[Path] = []
        for place in level:
            with suppress(OSError):
                below += sorted(one for one in place.iterdir() if one.is_dir() and not one.is_symlink())
            seen += 1
            if seen > MOST_FOLDERS:
                return None
        for one in below:
            with suppress(OSError):
                if (one / ".hydra" / "overrides.yaml").is_file() and (used(one) or (one / LOCK).exists()):
                    return one
        level = below
    return None


def standing(folder: Path) -> str:
    """Return a short text on the run in `folder` and its progress."""
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        return (
            f"{result['method']} {result['task']} seed {result['seed']}, finished, {counted(result['rounds'], 'round')}"
        )
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        rounds = len((folder / "metrics.jsonl").read_bytes().splitlines())
    except OSError:
        rounds = 0
    return f"not finished, {counted(rounds, 'round')}"


def free(folder: Path) -> Path:
    """Return `folder`, or the first of ``folder-2``, ``folder-3``... that holds no run.

    Default folder names contain the start time in seconds, and two runs may start in the same second.
    """
    names = (folder if i == 1 else folder.with_name(f"{folder.name}-{i}") for i in count(1))
    return next(name for name in names if not used(name) and not (name / LOCK).exists())


def folder_of(config: RunConfig) -> Path:
    """Return the folder of a run: the one that its settings name, or a new one (``flwr run``), named as usual."""
    new = f"{time.strftime('outputs/%Y-%m-%d/%H-%M-%S')}-{config.names['method']}-{config.names['task']}"
    return Path(config.resume or config.output or free(Path(new))).resolve()
