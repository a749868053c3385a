"""``requests.jsonl``: every request that a run with privacy has sent, also in rounds that a crash has undone.

A client's upload has told something about its data even if the server died before it could count it. So a line with the
client and its number of requests is on disk before the request leaves the server. A resumed run goes on in the file.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path

from fedcross.core.errors import StorageError, remedy
from fedcross.core.private_files import open_lines

NAME = "requests.jsonl"


class RequestLog:
    """Counts a run's requests to each client.

    Parameters
    ----------
    folder : Path
        The run's folder.
    before : Counter, optional
        Of a resumed run: requests to each client as far as the checkpoint knows. If the folder has no file, because an
        older version wrote none, each of these clients counts as asked once more.

    Attributes
    ----------
    counts : Counter
        Client -> number of requests.

    Raises
    ------
    StorageError
        If the file cannot be written.
    """

    def __init__(self, folder: Path, before: Counter[int] | None = None) -> None:
        self.path, self.counts = folder / NAME, Counter[int]()
        try:
            if before is None:
                self.path.unlink(missing_ok=True)
            known = self.path.exists()
            for line in self.path.read_bytes().splitlines() if known else ():
                with suppress(ValueError, KeyError, TypeError):  # cut off: that request was never sent
                    entry = json.loads(line)
                    self.counts[int(entry["client"])] = int(entry["requests"])
            for client, count in (before or {}).items():
                self.counts[client] = max(self.counts[client], count if known else count + 1)
            self._write(*self.counts)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be written ({error}). To go on: {remedy(error)}.") from error

    def add(self, client: int) -> None:
        """Count a request to `client`; it is on disk when this returns."""
        self.counts[client] += 1
        try:
            self._write(client)
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot be written ({error}). To go on: {remedy(error)}, then resume."
            ) from error

    def _write(self, *clients: int) -> None:
        with open_lines(self.path) as file:
            for client in clients:
                file.write(json.dumps({"client": client, "requests": self.counts[client]}) + "\n")
            file.flush()
            os.fsync(file.fileno())
