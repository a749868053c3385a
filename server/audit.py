"""The audit trail ``audit.jsonl``: who was asked to train which slot, with which digests, and what became of it.

The first line names the run. Each further line is on one request (:mod:`strategies.round.slot`) and carries the
SHA-256 of the line before. The newest checkpoint and ``result.json`` hold number and SHA-256 of the last line. A
resumed run continues the chain at the line that its checkpoint names. Whoever can rewrite all of these can forge them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from logging import WARNING
from pathlib import Path
from typing import Any, NamedTuple

from flwr.common.logger import log

from fedcross.core.errors import StorageError
from fedcross.core.files import dumps
from fedcross.server.checkpoint import Checkpoints
from fedcross.server.observers import Observer
from fedcross.server.run_folder import Lines

NAME, RESULT, FORMAT = "audit.jsonl", "result.json", 1


class Head(NamedTuple):
    """The last line of a chain: its number and its SHA-256; number -1 for an empty chain."""

    line: int = -1
    sha256: str = ""

    @classmethod
    def of(cls, plain: object) -> Head | None:
        """Return the head that the mapping `plain` describes; None if there is none."""
        return cls(int(plain["line"]), str(plain["sha256"])) if isinstance(plain, Mapping) else None


class Audit(Observer):
    """Writes the trail of the run named `run`.

    `settings` is the digest of its settings. `head` is where the checkpoint of round `after` says that the chain ended.
    """

    watches = frozenset({"request_ended"})
    file: Lines

    def __init__(self, folder: Path, run: str, settings: str, head: Head | None = None, after: int = 0) -> None:
        self.file, self.run, self.head = Lines(folder / NAME), run, Head()
        self._waiting: list[str] = []
        self._kept = [] if head is None else self.file.read()[: head.line + 1]
        if head is not None and self._kept:
            if len(self._kept) <= head.line or _sha256(self._kept[-1]) != head.sha256:
                raise StorageError(f"{self.file.path}: line {head.line} was changed. Look: fedcross audit {folder}")
            self.head = head
            return
        if after:
            log(WARNING, "%s: missing so far; the audit trail begins after round %s.", self.file.path, after)
        self.add({"format": FORMAT, "settings": settings, "after_round": after})

    def add(self, facts: Mapping[str, Any]) -> None:
        """Append a line; it is on disk at the end of the round."""
        number = self.head.line + 1
        text = dumps({"line": number, "run": self.run, "before": self.head.sha256, **facts}, separators=(",", ":"))
        self.head = Head(number, _sha256(text))
        self._waiting.append(text)

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        """Put the lines so far on disk, before the first checkpoint."""
        self.file.start(self._kept)
        self.round_finished({})

    def request(self, event: str, fields: Mapping[str, Any]) -> None:
        """Add a line on a request that has ended."""
        self.add({"key": None, **fields})

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        """Put the round's lines on disk, before its line of metrics and its checkpoint."""
        if self._waiting:
            self.file.add(*self._waiting)
        self._waiting = []


def check(folder: Path) -> tuple[list[dict[str, Any]], list[str], dict[str, Head]]:
    """Return the lines of a trail, what is wrong with them, and where other files say that it ends.

    A StorageError says that there is no readable trail.
    """
    ends = _ends(folder)
    try:
        texts = (folder / NAME).read_bytes().decode(errors="replace").split("\n")
    except OSError as error:
        raise StorageError(f"{folder / NAME}: no audit trail ({error.strerror}). log.audit=true writes one.") from error
    faults = [] if texts.pop() == "" and texts else [f"line {len(texts)}: cut off"]
    lines, before, run = list[dict[str, Any]](), "", None
    for number, text in enumerate(texts):
        found = {}
        with suppress(ValueError, TypeError, RecursionError):
            found = dict(json.loads(text))
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


def _ends(folder: Path) -> dict[str, Head]:
    """Return where ``result.json`` and the newest checkpoint say that the trail ends."""
    said: dict[str, object] = {"the newest checkpoint": Checkpoints(folder).identity()}
    with suppress(OSError, ValueError):
        said[RESULT] = json.loads((folder / RESULT).read_bytes())
    heads = {name: Head.of(plain.get("audit")) for name, plain in said.items() if isinstance(plain, dict)}
    return {name: head for name, head in heads.items() if head is not None}


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
