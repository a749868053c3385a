"""The visits of an asynchronous run, ``visits.jsonl``: a line each, in the order in which they ended.

Reports read it, and ``clock=replay clock.events=FILE`` repeats it. A line holds ``visit`` (number, from 0, in the order
of dispatch), ``round`` and ``group`` (visits of a group end at once), ``slot``, ``client``, ``start`` and ``finish``
(seconds of the run's clock), ``accepted``, and ``staleness`` (uploads accepted while the visit was under way).
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.common.logger import log

from fedcross.core.private_files import open_own, write_atomically
from fedcross.core.strict_json import dumps
from fedcross.server.observers import Observer
from fedcross.server.run_folder import writing

NAME = "visits.jsonl"


class Visits(Observer):
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

    watches = frozenset({"visit_ended"})

    def __init__(self, folder: Path, keep_until: int = 0, finished: int = 0) -> None:
        self.path = folder / NAME
        with writing(self.path):
            self._lines = _kept(self.path, keep_until)
        if len(self._lines) < finished:
            text = "%s: %d of %d visits are missing; this file cannot repeat the run. The model is not affected."
            log(WARNING, text, self.path, finished - len(self._lines), finished)

    def run_started(self, run: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> None:
        """Write the visits of earlier processes again, and open the file."""
        with writing(self.path):
            write_atomically(self.path, "".join(line + "\n" for line in self._lines).encode())
            self._file = open_own(self.path, "a")

    def request(self, event: str, fields: Mapping[str, Any]) -> None:
        """Append one visit."""
        with writing(self.path):
            self._file.write(dumps(fields) + "\n")
            self._file.flush()

    def round_finished(self, entry: Mapping[str, Any]) -> None:
        """Sync the file, before the checkpoint that covers its lines."""
        with writing(self.path):
            os.fsync(self._file.fileno())

    def run_ended(self, result: Mapping[str, Any] | None, error: BaseException | None = None) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # on a full disk, an earlier call has raised the error
            self._file.close()


def _kept(path: Path, until: int) -> list[str]:
    """Return the readable lines of the rounds up to `until`."""
    if not until or not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError, TypeError, KeyError):
            if json.loads(line)["round"] <= until:
                found.append(line)
    return found
