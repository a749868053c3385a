"""Stores a client's state between its visits on the client's own disk.

The file of a state carries the number of the visit that made it. With each request, the server sends the number of the
client's last accepted visit, and the client continues from exactly that state. So a lost upload, a crash or a resumed
run does not change the result.
"""

from __future__ import annotations

import re
import zlib
from logging import WARNING
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import numpy as np
from flwr.common.logger import log

from fedcross.core.errors import ProtocolError, StorageError, remedy
from fedcross.core.files import own_folder, replacing, sync_folder
from fedcross.strategies.wire.records import Arrays

_RUN = re.compile(r"[A-Za-z0-9_-]{1,64}")


class StateStore:
    """The stored states of one client in one run.

    Parameters
    ----------
    root : Path
        Folder for all runs and clients of this machine.
    run : str
        The run's identity.
    client : int
        Partition id.

    Raises
    ------
    ProtocolError
        If `run` or `client` could name a folder elsewhere: both come from the server.
    """

    def __init__(self, root: Path, run: str, client: int) -> None:
        run = run or "run"
        if not _RUN.fullmatch(run):
            raise ProtocolError(f"run={run[:80]!r}: not a name of a run (letters, digits, -, _). Nothing is stored.")
        if client < 0:
            raise ProtocolError(f"client={client}: a client's number is not negative.")
        self.folder = root / run / f"client-{client}"

    def load(self, visit: int) -> Arrays:
        """Return the state that `visit` made; empty for visit 0, or if it is missing (then a warning is logged)."""
        path = self._path(visit)
        if visit <= 0:
            return {}
        if not path.exists():
            log(WARNING, "%s: no state of visit %s found, this client starts anew. Was its disk replaced?", path, visit)
            return {}
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
        except (OSError, ValueError, EOFError, KeyError, AttributeError, BadZipFile, zlib.error) as error:
            log(WARNING, "%s: damaged (%s), this client starts anew.", path, error)
            return {}

    def save(self, visit: int, state: Arrays, keep: int) -> None:
        """Write the `state` of `visit` durably, and delete the states of all visits before `keep`."""
        try:
            own_folder(self.folder.parent)
            own_folder(self.folder)
            with replacing(self._path(visit)) as file, ZipFile(file, "w") as archive:
                for name, array in state.items():  # np.savez has arguments of its own, as `file`
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                        np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)
            sync_folder(self.folder)
            for old in self.folder.glob("*.npz"):
                if old.stem.isdecimal() and int(old.stem) < keep:
                    old.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(
                f"{self.folder}: the client's state cannot be written ({error}). To go on: {remedy(error)}."
            ) from error

    def _path(self, visit: int) -> Path:
        return self.folder / f"{visit}.npz"
