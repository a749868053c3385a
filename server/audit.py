"""The audit trail ``audit.jsonl``: who was asked to train which slot, with which digests, and what became of it.

The first line names the run. Each further line is on one request (:mod:`strategies.round.ledger`) and carries the
SHA-256 of the line before. The newest checkpoint and ``result.json`` hold number and SHA-256 of the last line. A
resumed run continues the chain at the line that its checkpoint names. Whoever can rewrite all of these can forge them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from logging import WARNING
from pathlib import Path
from typing import IO, Any

from flwr.common.logger import log

from fedcross.core.errors import StorageError, remedy
from fedcross.core.private_files import open_own, write_atomically
from fedcross.core.strict_json import dumps
from fedcross.server.observers import Observer

NAME, RESULT, FORMAT = "audit.jsonl", "result.json", 1


@dataclass(frozen=True)
class Head:
    """The last line of a chain: its number and its SHA-256; number -1 for an empty chain."""

    line: int = -1
    sha256: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the head as JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, plain: object) -> Head | None:
        """Return the head that :meth:`plain` described; None if `plain` is none."""
        return cls(int(plain["line"]), str(plain["sha256"])) if isinstance(plain, Mapping) else None


class Audit(Observer):
    """Writes the trail of the run named `run`.

    `settings` is the digest of its settings. `head` is where the checkpoint of round `after` says that the chain ended.
    """

    watches = frozenset({"request_ended"})

    def __init__(self, folder: Path, run: str, settings: str, head: Head | None = None, after: int = 0) -> None:
        self.path, self.run, self.head = folder / NAME, run, Head()
        self._waiting: list[str] = []
        self._file: IO[bytes] | None = None
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.is_file() and head is not None else []
        self._kept = lines[: head.line + 1] if head is not None else []
        if head is not None and self._kept:
            if len(self._kept) <= head.line or _sha256(self._kept[-1]) != head.sha256:
                raise StorageError(f"{self.path}: line {head.line} was changed. Look: fedcross audit {folder}")
            self.head = head
            return
        if after:
            log(WARNING, "%s: missing so far; the audit trail begins after round %s.", self.path, after)
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
                write_atomically(self.path, b"".join(line + b"\n" for line in self._kept))
                self._file = open_own(self.path, "ab")
            self._file.write("".join(f"{text}\n" for text in self._waiting).encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be written ({error}). {remedy(error)}, then resume.") from error
        self._waiting = []

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        """Put the first line on disk, before the first checkpoint."""
        self.flush()

    def request(self, event: str, fields: Mapping[str, Any]) -> None:
        """Add a line on a request that has ended."""
        self.add({"key": None, **fields})

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        """Put the round's lines on disk, before its line of metrics and its checkpoint."""
        self.flush()

    def run_ended(self, result: Mapping[str, Any] | None, error: BaseException | None = None) -> None:
        """Close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()


def check(folder: Path) -> tuple[list[dict[str, Any]], list[str], dict[str, Head]]:
    """Return the lines of a trail, what is wrong with them, and where other files say that it ends.

    Raises
    ------
    StorageError
        If there is no readable trail.
    """
    from fedcross.server.checkpoint import Checkpoints

    said: dict[str, object] = {}
    with contextlib.suppress(OSError, ValueError):
        said[RESULT] = json.loads((folder / RESULT).read_bytes())
    with contextlib.suppress(StorageError):
        said["the newest checkpoint"] = Checkpoints(folder).identity()
    heads = {name: Head.of(plain.get("audit")) for name, plain in said.items() if isinstance(plain, dict)}
    ends = {name: head for name, head in heads.items() if head is not None}
    try:
        texts = (folder / NAME).read_bytes().split(b"\n")
    except OSError as error:
        raise StorageError(f"{folder / NAME}: no audit trail ({error.strerror}). log.audit=true writes one.") from error
    faults = [] if texts.pop() == b"" and texts else [f"line {len(texts)}: cut off"]
    lines: list[dict[str, Any]] = []
    before, run = "", None
    for number, text in enumerate(texts):
        try:
            found = dict(json.loads(text))
        except (ValueError, TypeError, RecursionError):
            found = {}
        run = found.get("run") if number == 0 else run
        if (found.get("line"), found.get("before"), found.get("run")) != (number, before, run):
            faults.append(f"line {number}: it or the line before it was changed, moved or removed")
        before = _sha256(text)
        lines.append(found)
    for name, head in ends.items():
        if not 0 <= head.line < len(texts) or _sha256(texts[head.line]) != head.sha256:
            faults.append(f"line {head.line}: not the line that {name} names as the last one")
    if RESULT in ends and len(texts) - 1 > max(head.line for head in ends.values()):
        faults.append(f"line {len(texts) - 1}: behind the last line that {RESULT} names")
    return lines, faults, ends


def _sha256(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
