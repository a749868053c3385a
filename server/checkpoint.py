"""Checkpoints of a run: written under a temporary name, synced and renamed, so that one on disk is complete.

``checkpoints/round-000012.safetensors`` holds the method's arrays. Its header holds ``format``, ``version`` (of
fedcross), ``round``, the method's JSON ``values``, the run's ``identity``, the ``digest`` of arrays and values (equal
in every run of the same configuration) and the ``seal``, a digest of the header.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common.logger import log
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedcross.core.errors import StorageError
from fedcross.core.files import dumps_exact, loads_exact, open_lines, own_folder, write_atomically
from fedcross.server.run_folder import writing
from fedcross.strategies.round.driver import Driver
from fedcross.strategies.round.packing import Packed

FORMAT = 4
#: This version of fedcross; looking it up takes longer than the digest of a small model.
VERSION = version("fedcross")
#: File in the run's folder with the digest of every checkpoint, also of deleted ones; a round's last line counts.
DIGESTS = "digests.jsonl"
_NAME = re.compile(r"round-(\d{6,18})\.safetensors")


class Checkpoints:
    """The checkpoints of the run in `folder`: the newest `keep`, and that of every `milestone`-th round (0: none)."""

    def __init__(self, folder: Path, keep: int = 2, milestone: int = 0) -> None:
        self.folder, self.keep, self.milestone = folder / "checkpoints", keep, milestone

    def path(self, number: int) -> Path:
        """Return the file of round `number`."""
        return self.folder / f"round-{number:06d}.safetensors"

    def rounds(self) -> list[int]:
        """Return the rounds on disk, oldest first."""
        return sorted(int(found[1]) for path in self.folder.glob("round-*") if (found := _NAME.fullmatch(path.name)))

    def save(self, number: int, state: Packed, identity: Mapping[str, Any]) -> None:
        """Write the checkpoint of round `number` durably, then delete old ones; a StorageError if it cannot."""
        # asarray keeps scalars, unlike ascontiguousarray; the file has this machine's byte order.
        arrays = {n: np.asarray(a, a.dtype.newbyteorder("="), order="C") for n, a in state.arrays.items()}
        header = {"format": str(FORMAT), "version": VERSION, "round": str(number)}
        header |= {"values": dumps_exact(state.values), "identity": dumps_exact(dict(identity))}
        header["digest"] = _digest(arrays, header["values"])
        header["seal"] = _seal(header)
        path = self.path(number)
        try:
            data = save(arrays, metadata=header)
        except SafetensorError as error:
            raise StorageError(f"{path}: {error}. A header holds 100 MB: keep a method's numbers in arrays.") from error
        with writing(path):
            own_folder(self.folder)
            # The line first: after a crash in between, the round and its line are written again.
            with open_lines(self.folder.parent / DIGESTS) as lines:
                lines.write(dumps_exact({"round": number, "digest": header["digest"]}) + "\n")
                lines.flush()
                os.fsync(lines.fileno())
            write_atomically(path, data)
            # Later rounds were passed over as damaged: they must not push out good ones.
            for old in [one for one in self.rounds() if one <= number][: -self.keep]:
                if not (self.milestone and old and old % self.milestone == 0):
                    self.path(old).unlink()

    def load(self, number: int) -> tuple[Packed, dict[str, Any]]:
        """Return the state and identity in the checkpoint of round `number`; a StorageError if it cannot be used."""
        path, header = self.path(number), self._header(number)
        with _reading(path), safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            if header["digest"] != _digest(arrays, header["values"]):
                raise StorageError(f"{path}: the digest does not match, so the file is damaged.")
            return Packed(arrays, loads_exact(header["values"])), loads_exact(header["identity"])

    def identity(self) -> dict[str, Any] | None:
        """Return the identity in the newest checkpoint with a readable header; None if there is none."""
        for number in reversed(self.rounds()):
            try:
                return dict(loads_exact(self._header(number)["identity"]))
            except StorageError as error:
                log(WARNING, "%s", error)
        return None

    def latest(self) -> tuple[int, Packed, dict[str, Any]]:
        """Return round, state and identity of the newest usable checkpoint; a StorageError if there is none."""
        reason = ""
        for number in reversed(self.rounds()):
            try:
                return (number, *self.load(number))
            except StorageError as error:
                log(WARNING, "%s Trying the checkpoint before it.", error)
                reason = reason or f" {error}"
        raise StorageError(f"{self.folder}: no readable checkpoint. Start the run again in another folder.{reason}")

    def restore(self, driver: Driver, state: Packed, number: int) -> None:
        """Let `driver` continue from `state`, that of round `number`; a StorageError if it is of another method."""
        path = self.path(number)
        try:
            driver.restore(state)
        except StorageError as error:
            raise StorageError(f"{path}: {error}") from error
        except (LookupError, TypeError, ValueError) as error:
            said = (
                f"no state of this {type(driver.method).__name__} ({error}). Continue with the version that wrote it."
            )
            raise StorageError(f"{path}: {said}") from error

    def _header(self, number: int) -> dict[str, str]:
        """Return the header of the checkpoint of round `number`, or raise a StorageError that says why it is no use."""
        path = self.path(number)
        with _reading(path):
            with safe_open(path, framework="numpy") as file:
                header = dict(file.metadata() or {})
            if header.get("format") != str(FORMAT):
                writer = header.get("version", "0.2 or older")
                raise StorageError(f"{path}: written by fedcross {writer} in another format. Resume it with that.")
            seal = header.pop("seal", "")
            if seal != _seal(header):
                raise StorageError(f"{path}: the header's digest does not match, so the file is damaged.")
            if int(header["round"]) != number:
                raise StorageError(f"{path}: the name says round {number}, the content round {header['round']}.")
            return header


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what goes wrong with reading `path` inside the block into a StorageError."""
    try:
        if not path.is_file():
            raise StorageError(f"{path}: there is no such file.")
        yield
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise StorageError(f"{path}: cannot be read ({error}).") from error


def _seal(header: Mapping[str, str]) -> str:
    """Return the SHA-256 of the header's entries, so that a header is trusted without reading the arrays."""
    return hashlib.sha256(json.dumps(sorted(header.items())).encode()).hexdigest()


def _digest(arrays: Mapping[str, np.ndarray], values: str) -> str:
    """Return the SHA-256 of names, shapes, dtypes and values of `arrays`, and of the JSON text `values`."""
    digest = hashlib.sha256(json.dumps([["values", values]]).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}{array.dtype}{array.shape or (1,)}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
