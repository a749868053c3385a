"""The audit trail ``audit.jsonl``: who was asked to train which slot, with which digests, and what became of it.

The first line names the run and its settings. Each further line is on one request (:mod:`strategies.round.trail`). All
carry the SHA-256 of the line before, so a line that was changed, taken out, put in or moved breaks the chain.
The newest checkpoint, and in the end ``result.json``, hold number and SHA-256 of the last line, so lines missing at the
end are noticed as well. Who can rewrite all of these files can forge them all: keep the last hash elsewhere.

The lines of a round are on disk before its line of metrics and its checkpoint. A resumed run continues the chain at the
line that the checkpoint names: later lines are of rounds that it repeats, and replies that had been accepted in them
keep their digests in the log of replies.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import IO, Any

from flwr.common.logger import log

from fedcross.core.errors import StorageError, quoted, remedy
from fedcross.core.private_files import open_own
from fedcross.core.strict_json import dumps
from fedcross.server.accounting import write_atomically

NAME = "audit.jsonl"
FORMAT = 1
RESULT = "result.json"
#: Fields of a line that are whole numbers or null, and those that are text or null.
_NUMBERS, _TEXTS = ("line", "round", "slot", "client", "node"), ("run", "before", "key", "verdict")


@dataclass(frozen=True)
class Head:
    """The last line of a chain: its number and its SHA-256; number -1 for an empty chain."""

    line: int = -1
    sha256: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the head as JSON values."""
        return {"line": self.line, "sha256": self.sha256}

    @classmethod
    def of(cls, plain: object) -> Head | None:
        """Return the head that :meth:`plain` described; None if `plain` is none."""
        if not isinstance(plain, Mapping):
            return None
        line, sha256 = plain.get("line"), plain.get("sha256")
        return cls(line, sha256) if type(line) is int and isinstance(sha256, str) else None


class Audit:
    """Writes ``audit.jsonl``.

    Parameters
    ----------
    folder : Path
        The run's folder.
    run : str
        The run's identity.
    settings : str
        Digest of the settings that determine the result.
    head : Head, optional
        Where the checkpoint that the run continues from says that the chain ended; None for a new run.
    after : int
        The last round of that checkpoint.

    Raises
    ------
    StorageError
        If the file cannot be written, or does not hold the line at which it must go on.
    """

    def __init__(self, folder: Path, run: str, settings: str, head: Head | None = None, after: int = 0) -> None:
        self.path, self.run = folder / NAME, run
        self.head = Head()
        self._waiting: list[str] = []
        self._file: IO[bytes] | None = None  # opened when the first lines are written
        try:
            self._before = self._kept(head, after)
        except OSError as error:
            raise self._unwritable(error) from error
        if not self._before:
            self.add({"format": FORMAT, "settings": settings, "after_round": after})

    def add(self, facts: Mapping[str, Any]) -> None:
        """Append a line; it is on disk after :meth:`flush`."""
        number = self.head.line + 1
        text = dumps({"line": number, "run": self.run, "before": self.head.sha256, **facts}, separators=(",", ":"))
        self.head = Head(number, _sha256(text.encode()))
        self._waiting.append(text)

    def flush(self) -> None:
        """Put all lines on disk; called before the metrics and the checkpoint of the round."""
        if not self._waiting:
            return
        try:
            if self._file is None:
                write_atomically(self.path, self._before)
                self._file, self._before = open_own(self.path, "ab"), b""
            self._file.write("".join(f"{text}\n" for text in self._waiting).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._unwritable(error) from error
        self._waiting = []

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # on a full disk, `flush` has raised the error
                self._file.close()

    def _unwritable(self, error: OSError) -> StorageError:
        return StorageError(
            f"{self.path}: the audit trail cannot be written ({error}). To go on: {remedy(error)}, then resume."
        )

    def _kept(self, head: Head | None, after: int) -> bytes:
        """Return the lines up to `head`, which becomes the chain's head; nothing for a chain that begins now."""
        if not after and head is None:
            return b""
        if head is None or not self.path.is_file():
            why = "the rounds so far were run without an audit trail" if head is None else "the file is missing"
            log(WARNING, "%s: %s; the audit trail begins after round %s.", self.path, why, after)
            return b""
        kept = []
        for number, text in enumerate(self.path.read_bytes().split(b"\n")):
            kept.append(text + b"\n")
            if number == head.line and _sha256(text) == head.sha256:
                self.head = head
                return b"".join(kept)
        raise StorageError(
            f"{self.path}: line {head.line} is not the one that the checkpoint of round {after} names: the file was "
            f"changed. Look with: fedcross audit {quoted(self.path.parent)}. To go on without it, move it away."
        )


@dataclass(frozen=True)
class Checked:
    """What :func:`check` found.

    Attributes
    ----------
    lines : int
        Number of lines.
    faults : list of str
        What is wrong, with the line's number; empty if the chain holds.
    anchor : str
        The files that say where the chain has ended; "" if there are none.
    loose : int
        Lines behind that place, which only the chain itself protects.
    after : int
        The round after which the trail begins; 0 for one that holds the whole run.
    """

    lines: int
    faults: list[str]
    anchor: str
    loose: int = 0
    after: int = 0


def check(folder: Path) -> Checked:
    """Check the chain of the run in `folder`.

    Raises
    ------
    StorageError
        If there is no readable audit trail.
    """
    anchors = anchored(folder)  # before the lines: a run that goes on writes its lines before their anchor
    texts, whole = _texts(folder / NAME)
    run = _owner(folder)
    faults: list[str] = []
    before, expected = "", 0
    for number, text in enumerate(texts):
        found = _line(text)
        faults += _faults(number, expected, found, before, run or _run_of(texts))
        before = _sha256(text)
        expected = number + 1 if found is None or type(found.get("line")) is not int else found["line"] + 1
    if not whole:
        faults.append(f"line {len(texts) - 1}: cut off in the middle, or its end was taken away")
    for anchor, head in anchors.items():
        if head.line >= len(texts):
            faults.append(f"line {len(texts)}: missing; {anchor} says that the last line is {head.line}")
        elif head.line < 0 or _sha256(texts[head.line]) != head.sha256:
            faults.append(f"line {head.line}: not the line that {anchor} names")
    end = max((head.line for head in anchors.values()), default=-1)
    loose = max(len(texts) - 1 - end, 0)
    if loose and RESULT in anchors:
        faults.append(f"line {end + 1}: behind the last line that {RESULT} names; only a continued run may add lines")
    after = (_line(texts[0]) or {}).get("after_round")
    return Checked(len(texts), faults, " and ".join(anchors), loose, after if type(after) is int else 0)


def _faults(number: int, expected: int, found: dict[str, Any] | None, before: str, run: str) -> Iterator[str]:
    """Yield what is wrong with the line at place `number`, where the one before it makes line `expected` follow."""
    if found is None:
        yield f"line {number}: not a line of an audit trail"
    elif found.get("run") != run:
        yield f"line {number}: a line of run {str(found.get('run'))[:40]}, this is run {run}"
    elif found.get("line") != expected:
        yield f"line {number}: here stands line {str(found.get('line'))[:20]}, where line {expected} belongs"
    elif found.get("before") != before:
        what = (
            f"line {number - 1} is not as it was when this line was written" if number else "lines before it are gone"
        )
        yield f"line {number}: {what}"


def anchored(folder: Path) -> dict[str, Head]:
    """Return where the chain of `folder` has ended, by the file that says it."""
    from fedcross.server.checkpoint import Checkpoints

    result: object = None
    with contextlib.suppress(OSError, ValueError):
        result = json.loads((folder / RESULT).read_bytes())
    identity: object = None
    with contextlib.suppress(StorageError):
        identity = Checkpoints(folder).identity()
    found = {}
    for name, plain in ((RESULT, result), ("the newest checkpoint", identity)):
        head = Head.of(plain.get("audit")) if isinstance(plain, dict) else None
        if head is not None:
            found[name] = head
    return found


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Return the lines on requests in the audit trail of `folder`; those that cannot be read are left out."""
    found = (_line(text) for text in _texts(folder / NAME)[0])
    return [line for line in found if line is not None and "verdict" in line]


def _texts(path: Path) -> tuple[list[bytes], bool]:
    """Return the lines of `path`, and whether the last one is complete."""
    try:
        if path.exists() and not path.is_file():  # to read a pipe would wait for ever
            raise StorageError(f"{path}: no regular file. A run writes one with log.audit=true.")
        data = path.read_bytes()
    except FileNotFoundError as error:
        if not path.parent.is_dir():
            raise StorageError(f"{path.parent}: no such run folder. Name the folder of a run.") from error
        raise StorageError(f"{path}: no audit trail. A run on this machine writes one with log.audit=true.") from error
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror}). Name the folder of a run.") from error
    texts = data.split(b"\n")
    rest = texts.pop()
    if rest or not texts:
        return [*texts, rest], False
    return texts, True


def _line(text: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # the latter: brackets in brackets, thousands of them
        return None
    return found if isinstance(found, dict) and _typed(found) else None


def _typed(found: Mapping[str, Any]) -> bool:
    """Return whether the fields of a line that others count with are of their kind, where it has them."""
    kinds = [*((name, int) for name in _NUMBERS), *((name, str) for name in _TEXTS)]
    return all(found.get(name) is None or type(found[name]) is kind for name, kind in kinds)


def _run_of(texts: list[bytes]) -> str:
    """Return the run that the first line names."""
    return str((_line(texts[0]) or {}).get("run"))


def _owner(folder: Path) -> str:
    """Return the run that the folder's checkpoints belong to; "" if nothing says it."""
    from fedcross.server.checkpoint import Checkpoints

    with contextlib.suppress(StorageError):
        return Checkpoints(folder).owner() or ""
    return ""


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
