"""Checkpoints of a run; a checkpoint on disk is always complete.

``checkpoints/round-000012.safetensors`` holds the method's arrays. Its header holds the method's JSON values, the run's
identity and a digest of all bytes. Each file is written under a temporary name, synced and then renamed.
"""

from __future__ import annotations

import hashlib
import json
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common.logger import log
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedcross.core.errors import StorageError
from fedcross.server.accounting import write_atomically
from fedcross.strategies.round.federation import State


class Checkpoints:
    """The checkpoints of one run.

    Parameters
    ----------
    folder : Path
        The run's folder.
    keep : int
        How many of the newest checkpoints stay.
    milestone : int
        The checkpoint of every `milestone`-th round is never deleted; 0 for none.
    """

    def __init__(self, folder: Path, keep: int = 2, milestone: int = 0) -> None:
        self.folder = folder / "checkpoints"
        self.keep = keep
        self.milestone = milestone

    def path(self, number: int) -> Path:
        """Return the file of round `number`."""
        return self.folder / f"round-{number:06d}.safetensors"

    def rounds(self) -> list[int]:
        """Return the rounds on disk, oldest first."""
        return sorted(int(p.stem.removeprefix("round-")) for p in self.folder.glob("round-*.safetensors"))

    def save(self, number: int, state: State, identity: dict[str, Any]) -> None:
        """Write the checkpoint of round `number` durably, then delete old ones."""
        arrays = {name: np.ascontiguousarray(array) for name, array in state.arrays.items()}
        header = {"round": str(number), "values": json.dumps(state.values), "identity": json.dumps(identity)}
        header["digest"] = _digest(arrays, header)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path(number), save(arrays, metadata=header))
            for old in self.rounds()[: -self.keep]:
                if not (self.milestone and old and old % self.milestone == 0):
                    self.path(old).unlink()
        except OSError as error:
            raise StorageError(
                f"{self.path(number)}: the checkpoint cannot be written ({error}). The rounds before it are safe; "
                "free disk space and continue with resume=RUN."
            ) from error

    def load(self, number: int) -> tuple[State, dict[str, Any]]:
        """Return the method's state and the run's identity from the checkpoint of round `number`.

        Raises
        ------
        StorageError
            If the file is missing or damaged.
        """
        try:
            with safe_open(self.path(number), framework="numpy") as file:
                header = dict(file.metadata() or {})
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            found = header.pop("digest")
            if found != _digest(arrays, header):
                raise StorageError(f"{self.path(number)}: the digest does not match, so the file is damaged.")
            values = json.loads(header["values"])
            return State(arrays, values), json.loads(header["identity"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise StorageError(f"{self.path(number)}: cannot be read ({error}).") from error

    def identity(self) -> dict[str, Any] | None:
        """Return the identity in the newest checkpoint with a readable header; None if there is none."""
        for number in reversed(self.rounds()):
            try:
                with safe_open(self.path(number), framework="numpy") as file:
                    found: dict[str, Any] = json.loads((file.metadata() or {})["identity"])
                    return found
            except (OSError, SafetensorError, KeyError, ValueError):
                continue
        return None

    def latest(self) -> tuple[int, State, dict[str, Any]]:
        """Return round, state and identity of the newest readable checkpoint; log a warning for each damaged one.

        Raises
        ------
        StorageError
            If none is readable.
        """
        for number in reversed(self.rounds()):
            try:
                return (number, *self.load(number))
            except StorageError as error:
                log(WARNING, "%s Trying the checkpoint before it.", error)
        raise StorageError(f"{self.folder}: no readable checkpoint. Start the run again without resume.")


def _digest(arrays: dict[str, np.ndarray], header: dict[str, str]) -> str:
    """Return the SHA-256 of names, shapes, dtypes, values and header."""
    digest = hashlib.sha256(json.dumps(sorted(header.items())).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}{array.dtype}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
