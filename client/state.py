"""What a client keeps between its visits, on its own disk.

A state is named by the visit that made it. The server says with each request which of the client's visits it accepted
last, and the client continues from exactly that one: a lost upload, a crash or a resumed run leaves no trace.
"""

from __future__ import annotations

import os
import tempfile
from logging import WARNING
from pathlib import Path

import numpy as np
from flwr.common.logger import log

from fedcross.core.errors import StorageError
from fedcross.strategies.wire.records import Arrays


class StateStore:
    """States of one client in one run.

    Parameters
    ----------
    root : Path
        Folder for all runs and clients of this machine.
    run : str
        The run's identity.
    client : int
        Partition id.
    """

    def __init__(self, root: Path, run: str, client: int) -> None:
        self.folder = root / (run or "run") / f"client-{client}"

    def load(self, visit: int) -> Arrays:
        """Return the state that `visit` made; empty if it is 0 or not here (a replaced device: a warning says so)."""
        path = self._path(visit)
        if visit <= 0:
            return {}
        if not path.exists():
            log(WARNING, "%s: no state of visit %s here, this client starts anew. Was its disk replaced?", path, visit)
            return {}
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}

    def save(self, visit: int, state: Arrays, keep: int) -> None:
        """Keep `state` under `visit`, durably, and forget all visits before `keep`."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=self.folder, suffix=".part", delete=False) as part:
                np.savez(part, **state)  # type: ignore[arg-type]
                part.flush()
                os.fsync(part.fileno())
            Path(part.name).replace(self._path(visit))
            for old in self.folder.glob("*.npz"):
                if int(old.stem) < keep:
                    old.unlink()
        except OSError as error:
            raise StorageError(
                f"{self.folder}: the client's state cannot be written ({error}). Free disk space."
            ) from error

    def _path(self, visit: int) -> Path:
        return self.folder / f"{visit}.npz"
