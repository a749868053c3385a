"""The write-ahead log of accepted replies: after a crash of the server no accepted work of a client is lost.

``checkpoints/accepted.log`` holds the replies accepted since the last checkpoint, each on disk (fdatasync) before it
counts, and from which clients each round was drawn. After a crash the server repeats these rounds with the same
clients and requests only the missing replies. A record is ``magic, length, CRC-32`` and a safetensors file whose header
describes it; the log ends before the first incomplete or damaged record.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from logging import INFO, WARNING
from pathlib import Path
from typing import IO, Any

import numpy as np
from flwr.common.logger import log
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedcross.core.files import dumps_exact, loads_exact, open_own, own_folder, sync_folder
from fedcross.server.run_folder import writing
from fedcross.strategies.method import Round, Trace, Upload
from fedcross.strategies.pool.pool import Arrays
from fedcross.strategies.wire.records import EXTRA

CURE = "then resume, or set checkpoint.log=false"
#: Names the nodes during whose replies a process of this run died, and the one whose reply is being pulled.
PULLING = "pulling"
MAGIC = b"FCL4"
#: Fields of an upload that the header of its record holds as they are.
FIELDS = ("client", "slot", "num_examples", "metrics", "nbytes")
_HEAD = struct.Struct("<4sQI")
_MODEL = "model."


class WriteAheadLog:
    """The log of one run, a :class:`strategies.round.ledger.ReplyLog`.

    A log of another run than `run` is ignored, and one that follows another checkpoint than that of round `after`.
    """

    def __init__(self, folder: Path, run: str, after: int) -> None:
        self.path = folder / "checkpoints" / "accepted.log"
        self.run, self._after = run, after
        self._draws: dict[int, list[tuple[int, float]]] = {}  # round -> partitions and widths
        self._accepted: dict[tuple[int, int], list[Upload]] = {}  # (round, exchange) -> uploads
        self._over: set[tuple[int, int]] = set()
        self._order: list[tuple[int, int, float | None]] = []
        self._file: IO[bytes] | None = None  # opened when the first record is written
        with writing(self.path, CURE):
            noted = self.path.with_name(PULLING)
            self._deaths = [int(word) for word in noted.read_text().split()] if noted.is_file() else []
            self._good = self._read() if self.path.is_file() else 0

    def drawn(self, number: int) -> dict[int, float] | None:
        """Return partition -> width of its device, of those from which round `number` drew; None if it had not."""
        found = self._draws.get(number)
        return None if found is None else dict(found)

    def draw(self, number: int, budgets: Mapping[int, float]) -> None:
        """Record from which partitions, of which widths, a round draws its clients; the first reply syncs it."""
        self._append({"kind": "draw", "round": number, "budgets": list(budgets.items())}, durable=False)

    def accepted(self, current: Round) -> list[Upload]:
        """Return the uploads accepted in this exchange; each upload is returned once."""
        found = self._accepted.pop((current.number, current.exchange), [])
        if found:
            log(INFO, "fedcross: %s replies of round %s are in the log, not asked again", len(found), current.number)
        return found

    def accept(self, current: Round, upload: Upload) -> None:
        """Record `upload`; it is on disk when this method returns."""
        facts = {
            **{"kind": "reply", "round": current.number, "exchange": current.exchange},
            **{name: getattr(upload, name) for name in FIELDS},
            "order": [list(upload.arrays), {group: list(arrays) for group, arrays in upload.extras.items()}],
            **({} if upload.trace is None else {"trace": asdict(upload.trace)}),
        }
        extras = {f"{EXTRA}{group}/{name}": a for group, found in upload.extras.items() for name, a in found.items()}
        self._append(facts, {_MODEL + name: array for name, array in upload.arrays.items()} | extras)

    def is_over(self, current: Round) -> bool:
        """Return whether the log says that the exchange has ended."""
        return (current.number, current.exchange) in self._over

    def end(self, current: Round, at: float | None = None) -> None:
        """Record that the exchange has ended; `at`: when, in seconds of the run's clock, if it has one."""
        facts = {"kind": "end", "round": current.number, "exchange": current.exchange}
        self._append(facts if at is None else {**facts, "at": at})

    def order(self) -> list[tuple[int, int, float | None]]:
        """Return round, exchange and time of each reply and end that was found on disk, in their order there."""
        return list(self._order)

    def pulling(self, node: int | None) -> None:
        """Note which node's reply is pulled next; None: none is. A death of this process leaves the note."""
        with writing(self.path, CURE):
            own_folder(self.path.parent)
            nodes = self._deaths if node is None else [*self._deaths, node]
            self.path.with_name(PULLING).write_text(" ".join(map(str, nodes)))

    def killers(self) -> list[int]:
        """Return the nodes during whose replies processes died twice since the checkpoint: once can be chance."""
        return [node for node, deaths in Counter(self._deaths).items() if deaths > 1]

    def restart(self, after: int) -> None:
        """Empty the log, because the checkpoint of round `after` is on disk."""
        self.close()
        self._after, self._good, self._deaths = after, 0, []
        self._open()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # on a full disk, an earlier write has already raised the error
                self._file.close()
            self._file = None

    def _open(self) -> IO[bytes]:
        """Return the file, positioned after its last complete record; start a new file if needed."""
        if self._file is None:
            with writing(self.path, CURE):
                own_folder(self.path.parent)
                self._file = open_own(self.path, "r+b" if self._good else "wb")
                self._file.truncate(self._good)
                self._file.seek(self._good)
                sync_folder(self.path.parent)
            if not self._good:
                self._append({"kind": "start", "run": self.run, "after": self._after}, durable=False)
        return self._file

    def _append(self, facts: dict[str, Any], arrays: Arrays | None = None, *, durable: bool = True) -> None:
        contiguous = {name: np.asarray(array, order="C") for name, array in (arrays or {}).items()}
        data = save(contiguous, metadata={"facts": dumps_exact(facts)})
        file = self._open()
        with writing(self.path, CURE):
            file.write(_HEAD.pack(MAGIC, len(data), zlib.crc32(data)))
            file.write(data)
            file.flush()
            if durable:
                os.fdatasync(file.fileno())

    def _read(self) -> int:
        """Read the log on disk; return the length of its intact part, 0 if it is of another run or checkpoint."""
        good, expected = 0, ("start", self.run, self._after)
        for facts, arrays, stop in records(self.path):
            if not good and (facts.get("kind"), facts.get("run"), facts.get("after")) != expected:
                log(WARNING, "%s does not follow the checkpoint of round %s; it is ignored.", self.path, self._after)
                return 0
            self._take(facts, arrays)
            good = stop
        return good

    def _take(self, facts: dict[str, Any], arrays: Arrays) -> None:
        if facts["kind"] == "draw":
            self._draws[facts["round"]] = facts["budgets"]
        if facts["kind"] not in ("end", "reply"):
            return
        place = facts["round"], facts["exchange"]
        self._order.append((*place, facts.get("at")))
        if facts["kind"] == "end":
            self._over.add(place)
            return
        model, extras = facts["order"]
        upload = Upload(
            **{name: facts[name] for name in FIELDS},
            arrays={name: arrays[_MODEL + name] for name in model},
            extras={g: {name: arrays[f"{EXTRA}{g}/{name}"] for name in names} for g, names in extras.items()},
            trace=Trace(**facts["trace"]) if "trace" in facts else None,
        )
        self._accepted.setdefault(place, []).append(upload)


def records(path: Path) -> Iterator[tuple[dict[str, Any], Arrays, int]]:
    """Yield facts, arrays and end position of every complete record; log a warning if anything follows the last one."""
    with path.open("rb") as file:
        size, start = path.stat().st_size, 0
        while start < size:
            head = file.read(_HEAD.size)
            whole = len(head) == _HEAD.size
            magic, length, checksum = _HEAD.unpack(head) if whole else (b"", 0, 0)
            stop = start + _HEAD.size + length
            # The length is compared with the file size first, so that a damaged length does not allocate memory.
            data = file.read(length) if magic == MAGIC and stop <= size else b""
            try:
                if not data or zlib.crc32(data) != checksum:
                    raise ValueError
                header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
                found = loads_exact(header["__metadata__"]["facts"]), load(data)
            except (SafetensorError, ValueError, KeyError, TypeError):
                log(WARNING, "%s: incomplete or damaged at byte %s of %s; the rest is ignored.", path, start, size)
                return
            yield (*found, stop)
            start = stop
