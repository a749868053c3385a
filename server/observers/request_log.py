"""``requests.jsonl``: every request of a run with privacy, on disk before it is sent.

An upload reveals something about its client's data, even if a crash undoes the round. A resumed run continues the file.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedcross.core.private_files import open_lines
from fedcross.server.observers import Observer
from fedcross.server.run_folder import writing

NAME = "requests.jsonl"


class RequestLog(Observer):
    """Counts a run's requests to each client.

    Parameters
    ----------
    folder : Path
        The run's folder.
    before : Counter, optional
        Of a resumed run: requests to each client, as its checkpoint counts them; None for a new run.

    Attributes
    ----------
    counts : Counter
        Client -> number of requests.
    """

    watches = frozenset({"request"})

    def __init__(self, folder: Path, before: Counter[int] | None = None) -> None:
        self.path, self.counts = folder / NAME, Counter[int]()
        with writing(self.path):
            if before is None:
                self.path.unlink(missing_ok=True)
            for line in self.path.read_bytes().splitlines() if self.path.exists() else ():
                with suppress(ValueError, KeyError, TypeError):  # cut off: that request was never sent
                    entry = json.loads(line)
                    self.counts[int(entry["client"])] = int(entry["requests"])
            self.counts |= before or Counter()  # the larger count of each client
            self._write(*self.counts)

    def request(self, event: str, fields: Mapping[str, Any]) -> None:
        """Count a request; it is on disk when this returns."""
        self.counts[fields["client"]] += 1
        with writing(self.path):
            self._write(fields["client"])

    def _write(self, *clients: int) -> None:
        with open_lines(self.path) as file:
            for client in clients:
                file.write(json.dumps({"client": client, "requests": self.counts[client]}) + "\n")
            file.flush()
            os.fsync(file.fileno())
