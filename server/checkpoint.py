"""Checkpoints of a run; a checkpoint on disk is always complete, and used only in the run and round that it names.

``checkpoints/round-000012.safetensors`` holds the method's arrays. Its header holds the round, the method's JSON
values, the run's identity, the format's number, a digest of the method's state (which is the same in every run of the
same configuration) and a digest of the header.
``checkpoints/run.json`` names the run to which the folder belongs. Each file is written under a temporary name, synced
and then renamed.

Formats
-------
1. Version 0.1: no format number, no digest of the header, no ``run.json``; the folder belongs to the one run that all
   its checkpoints name.
2. The one that is written now.

Each number in :data:`READABLE` is read; a checkpoint with another one is passed over with a warning. Whoever changes
what the header holds raises :data:`FORMAT`, and keeps the old number in :data:`READABLE` as long as a test continues a
folder of that format (``tests/server/run-0.1`` for 1).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from logging import WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.common.logger import log
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from fedcross.core.errors import StorageError, remedy
from fedcross.core.private_files import open_lines, own_folder
from fedcross.core.strict_json import dumps_exact, loads_exact
from fedcross.server.accounting import write_atomically
from fedcross.strategies.round.base import Method
from fedcross.strategies.round.federation import State

FORMAT = 2
READABLE = (1, 2)
#: File in the run's folder with the digest of every checkpoint, also of deleted ones; a round's last line counts.
DIGESTS = "digests.jsonl"
#: Names the run to which the folder of checkpoints belongs.
RECORD = "run.json"
_NAME = re.compile(r"round-(\d{6,18})\.safetensors")


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
        found = (_NAME.fullmatch(path.name) for path in self.folder.glob("round-*.safetensors"))
        return sorted({int(name[1]) for name in found if name and name[0] == self.path(int(name[1])).name})

    def save(self, number: int, state: State, identity: dict[str, Any]) -> None:
        """Write the checkpoint of round `number` durably, then delete old ones; its state's digest is kept for good."""
        # Not ascontiguousarray, which makes a scalar a list of one. The file has this machine's order of bytes.
        arrays = {n: np.asarray(a, a.dtype.newbyteorder("="), order="C") for n, a in state.arrays.items()}
        header = {"format": str(FORMAT), "round": str(number)}
        header |= {"values": dumps_exact(state.values), "identity": dumps_exact(identity)}
        header["digest"] = _digest(arrays, {"values": header["values"]})
        header["seal"] = _seal(header)
        try:
            written = save(arrays, metadata=header)
        except SafetensorError as error:
            raise StorageError(
                f"{self.path(number)}: the checkpoint cannot be written ({error}). A header holds up to 100 MB: a "
                "method or strategy with more numbers must keep them in arrays. The rounds before it are safe."
            ) from error
        try:
            own_folder(self.folder)
            self._record(str(identity.get("run", "")))
            # First the line: after a crash in between, the round and its line are written again, and the last counts.
            with open_lines(self.folder.parent / DIGESTS) as lines:
                lines.write(dumps_exact({"round": number, "digest": header["digest"]}) + "\n")
                lines.flush()
                os.fsync(lines.fileno())
            write_atomically(self.path(number), written)
            # Later rounds are not of this run, or were passed over as damaged: they must not push out good ones.
            for old in [round_ for round_ in self.rounds() if round_ <= number][: -self.keep]:
                if not (self.milestone and old and old % self.milestone == 0):
                    self.path(old).unlink()
        except OSError as error:
            raise StorageError(
                f"{self.path(number)}: the checkpoint cannot be written ({error}). The rounds before it are safe; "
                f"{remedy(error)} and continue with resume=RUN."
            ) from error

    def load(self, number: int) -> tuple[State, dict[str, Any]]:
        """Return the method's state and the run's identity from the checkpoint of round `number`.

        Raises
        ------
        StorageError
            If the file is missing, damaged, of a newer format, or is not this run's checkpoint of that round.
        """
        path = self.path(number)
        header = self._header(number)
        try:
            with safe_open(path, framework="numpy") as file:
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
            found = header.pop("digest")
            digested = header if header.get("format", "1") == "1" else {"values": header["values"]}
            if found != _digest(arrays, digested):
                raise StorageError(f"{path}: the digest does not match, so the file is damaged.")
            identity = loads_exact(header["identity"])
            owner = self.owner()
            if owner is not None and identity.get("run") != owner:
                raise StorageError(f"{path}: a checkpoint of run {identity.get('run')}, but this is run {owner}.")
            return State(arrays, loads_exact(header["values"])), identity
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise StorageError(f"{path}: cannot be read ({error}).") from error

    def identity(self) -> dict[str, Any] | None:
        """Return the identity in this run's newest checkpoint with a readable header; None if there is none."""
        owner = self.owner()
        for number in reversed(self.rounds()):
            found = self._identity(number)
            if found is not None and owner in (None, found.get("run")):
                return found
        return None

    def latest(self) -> tuple[int, State, dict[str, Any]]:
        """Return round, state and identity of the newest checkpoint that can be used; log a warning for each other one.

        Raises
        ------
        StorageError
            If there is none.
        """
        rounds = self.rounds()
        known = {self.path(number) for number in rounds} | {self.folder / RECORD, self.folder / "accepted.log"}
        for stray in sorted(set(self.folder.glob("*")) - known):
            log(WARNING, "%s: not a checkpoint's name (round-000001.safetensors); it is ignored.", stray)
        reason = ""
        for number in reversed(rounds):
            try:
                return (number, *self.load(number))
            except StorageError as error:
                log(WARNING, "%s Trying the checkpoint before it.", error)
                reason = reason or f" {error}"
        raise StorageError(
            f"{self.folder}: no readable checkpoint. Start the run again without resume=, in another folder.{reason}"
        )

    def owner(self) -> str | None:
        """Return the run to which this folder belongs; None if no file names one.

        Raises
        ------
        StorageError
            If nothing says which one of several runs it is.
        """
        try:
            named = json.loads((self.folder / RECORD).read_bytes())["run"]
            if isinstance(named, str):
                return named
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError) as error:
            log(WARNING, "%s: cannot be read (%s); the checkpoints say whose they are.", self.folder / RECORD, error)
        runs = {str(found.get("run")) for number in self.rounds() if (found := self._identity(number)) is not None}
        if len(runs) > 1:
            raise StorageError(
                f"{self.folder}: checkpoints of {len(runs)} runs ({', '.join(sorted(runs))}). Keep those of one."
            )
        return runs.pop() if runs else None

    def _record(self, run: str) -> None:
        """Write whose folder this is, unless it says so already."""
        path, text = self.folder / RECORD, dumps_exact({"format": FORMAT, "run": run}) + "\n"
        if not path.is_file() or path.read_bytes() != text.encode():
            write_atomically(path, text.encode())

    def _header(self, number: int) -> dict[str, str]:
        """Return the header of the checkpoint of round `number`, or raise a StorageError that says why it is no use."""
        path = self.path(number)
        try:
            if not path.is_file():  # opening a pipe would wait for ever
                raise StorageError(f"{path}: there is no such file.")
            with safe_open(path, framework="numpy") as file:
                header = dict(file.metadata() or {})
            version = int(header.get("format", "1"))
            if version not in READABLE:
                raise StorageError(f"{path}: format {version}, this version reads up to {FORMAT}. Update fedcross.")
            unsealed = {name: text for name, text in header.items() if name != "seal"}
            if version > 1 and header["seal"] != _seal(unsealed):
                raise StorageError(f"{path}: the header's digest does not match, so the file is damaged.")
            if int(header["round"]) != number:
                raise StorageError(f"{path}: the name says round {number}, the content round {int(header['round'])}.")
            return header
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise StorageError(f"{path}: cannot be read ({error}).") from error

    def _identity(self, number: int) -> dict[str, Any] | None:
        """Return the identity in the header of the checkpoint of round `number`; None if it cannot be used."""
        try:
            found = loads_exact(self._header(number)["identity"])
        except (StorageError, KeyError, ValueError):
            return None
        return found if isinstance(found, dict) else None


def resume(method: Method, state: State, path: Path) -> None:
    """Let `method` continue from `state`, which an intact checkpoint at `path` holds.

    Raises
    ------
    StorageError
        If the state is of another model or method.
    """
    try:
        method.resume(state)
    except StorageError as error:
        raise StorageError(f"{path}: {error}") from error
    except (LookupError, TypeError, ValueError) as error:
        fault = f"has no {error}" if isinstance(error, KeyError) else f"cannot be used ({error})"
        raise StorageError(
            f"{path}: this checkpoint {fault}. Another version of {type(method).__name__} wrote it: continue with that."
        ) from error


def _seal(header: dict[str, str]) -> str:
    """Return the SHA-256 of the header's entries, so that a header is trusted without reading the arrays."""
    return hashlib.sha256(json.dumps(sorted(header.items())).encode()).hexdigest()


def _digest(arrays: dict[str, np.ndarray], header: dict[str, str]) -> str:
    """Return the SHA-256 of names, shapes, dtypes and values of `arrays`, and of `header`.

    A scalar counts as a list of one: earlier versions stored it so, and digests of both can be compared.
    """
    digest = hashlib.sha256(json.dumps(sorted(header.items())).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name}{array.dtype}{array.shape or (1,)}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
