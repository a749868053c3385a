"""The record of an asynchronous run's visits, ``visits.jsonl``: one line for each, in the order in which they ended.

Reports read it, and ``clock=replay clock.events=FILE`` repeats it. A line holds:

``visit``
    Number of the visit in the run, from 0, in the order of dispatch.
``round``, ``group``
    In which round it ended, and in which group of that round; the visits of a group were handled at once.
``slot``, ``client``, ``start``, ``finish``
    Whose model, who trained it, and when, in seconds of the run's clock.
``accepted``
    Whether its upload was accepted; otherwise the visit was lost.
``staleness``
    Uploads that the server accepted while the visit was under way.
"""

from __future__ import annotations

import contextlib
import json
import os
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common.logger import log

from fedcross.core.errors import StorageError, remedy
from fedcross.core.private_files import open_own
from fedcross.core.strict_json import dumps
from fedcross.server.accounting import write_atomically

NAME = "visits.jsonl"


class VisitLedger:
    """Writes ``visits.jsonl``.

    Parameters
    ----------
    folder : Path
        The run's folder.
    keep_until : int
        Lines of later rounds, which an interrupted run left, are removed.
    finished : int
        Visits that had ended by then; a warning says how many lines are missing.
    """

    def __init__(self, folder: Path, keep_until: int = 0, finished: int = 0) -> None:
        self.path = folder / NAME
        try:
            kept = _kept(self.path, keep_until)
            if len(kept) < finished:
                log(
                    WARNING,
                    "%s: %d of the %d visits of rounds 1 to %d are missing. The model does not depend on them, reports "
                    "do, and the run cannot be repeated by this file.",
                    self.path, finished - len(kept), finished, keep_until,
                )  # fmt: skip
            write_atomically(self.path, "".join(line + "\n" for line in kept).encode())
            self._file = open_own(self.path, "a")
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot be written ({error}). To go on: {remedy(error)}, then resume."
            ) from error

    def add(self, line: dict[str, Any]) -> None:
        """Append one visit."""
        self._write(dumps(line) + "\n")

    def flush(self) -> None:
        """Put all lines on disk; called before the checkpoint that covers them."""
        self._write("")
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # on a full disk, an earlier call has raised the error
            self._file.close()

    def _write(self, text: str) -> None:
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot be written ({error}). To go on: {remedy(error)}, then resume."
            ) from error


def _kept(path: Path, until: int) -> list[str]:
    """Return the lines of the rounds up to `until`; those that cannot be read are left out."""
    if not until or not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if json.loads(line)["round"] <= until:
                found.append(line)
    return found
