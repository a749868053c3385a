"""The errors that fedcross raises, as one class tree.

::

    FedcrossError
    ├── ConfigError        the configuration is wrong; carries every fault found, exit code 2
    ├── DataError          a data set or a client's folder is missing, damaged or empty, exit code 2
    ├── StorageError       an output folder or checkpoint cannot be read or written, exit code 2
    ├── ProtocolError      a message is not what the protocol says
    │   └── UploadError    an upload that the guard rejects; has a short `reason` for the counters
    ├── FederationError    not enough clients, an engine that does not start, exit code 1
    └── DeviceError        a GPU that this process cannot use any more, exit code 1

Each message says what was wrong, the value seen and what to do.
"""

from __future__ import annotations

import errno
import importlib
import os
import shlex
from collections.abc import Sequence
from difflib import get_close_matches
from types import ModuleType

#: Names that a message lists at most.
MOST_NAMES = 40


class FedcrossError(Exception):
    """Base of all errors that fedcross raises on purpose."""

    exit_code = 1


class ConfigError(FedcrossError):
    """One or more faults in the configuration.

    Parameters
    ----------
    faults : sequence of str
        One complete sentence each: what, the value seen, what to do.
    """

    exit_code = 2

    def __init__(self, faults: Sequence[str] | str) -> None:
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        super().__init__("\n".join(self.faults))


class DataError(FedcrossError):
    """A data set, partition or client folder cannot be used."""

    exit_code = 2


class StorageError(FedcrossError):
    """A folder or file of a run cannot be read or written."""

    exit_code = 2


class ProtocolError(FedcrossError):
    """A message between server and client is not what the protocol says."""


class UploadError(ProtocolError):
    """An upload that must not reach aggregation.

    Parameters
    ----------
    reason : str
        Short snake_case name of the kind of fault, used as a counter (``non_finite``, ``wrong_shape``, ...).
    detail : str
        What was seen. A device may have written it, so it is made one line without control characters.
    """

    def __init__(self, reason: str, detail: str) -> None:
        self.reason = reason
        super().__init__(f"{reason}: {one_line(detail)}")


class FederationError(FedcrossError):
    """The federation cannot do a round: no clients, no engine."""


class DeviceError(FedcrossError):
    """The GPU failed so that this process cannot use it any more; only a new process can."""


def remedy(error: OSError) -> str:
    """Return what to do about a file that cannot be written, without a full stop: ``free disk space``, as a rule."""
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return "allow more open files (ulimit -n), or end what holds them"
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return "give this user the right to write there"
    if error.errno == errno.EISDIR:
        return "move the folder of that name away"
    return "free disk space"


def quoted(path: os.PathLike[str] | str) -> str:
    """Return a path as a shell takes it, for the commands in messages."""
    return shlex.quote(os.fspath(path))


def closed_to_user(error: PermissionError) -> str:
    """Return what to say of a file or folder, which `error` names, that this user may not use."""
    who = f"user {os.getuid()} has no right to it"
    return f"{error.filename}: {error.strerror}, {who}. Run as its owner, or change its mode."


def one_line(text: str) -> str:
    """Return `text` in one line; what a terminal would obey (escape sequences, a carriage return) as an escape."""
    joined = " ".join(part for part in text.split("\n") if part.strip())
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in joined)


def counted(number: object, what: str) -> str:
    """Return ``1 round`` or ``3 rounds`` for a noun with such a plural."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def nearest(name: str, known: Sequence[str]) -> str:
    """Return ``Did you mean 'x'?`` for the nearest known name, or the known names (of many, the first)."""
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    if close:
        return f"Did you mean '{close[0]}'?"
    ordered = sorted(known)
    more = f" and {len(ordered) - MOST_NAMES} more" if len(ordered) > MOST_NAMES else ""
    return f"There are: {', '.join(ordered[:MOST_NAMES])}{more}."


def install(extra: str) -> str:
    """Return the sentence that says how to install the optional dependencies `extra` (docs/index.md)."""
    return f"Install it in the checkout with: pip install -e '.[{extra}]'"


def needed(module: str, extra: str, what: str) -> ModuleType:
    """Import `module` of the optional dependencies `extra`, which `what` needs; ConfigError if it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        top = module.partition(".")[0]
        if (error.name or "").partition(".")[0] != top:
            raise
        raise ConfigError(f"{what}: {top} is not installed. {install(extra)}.") from error
