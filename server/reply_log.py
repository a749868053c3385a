"""The write-ahead log of accepted replies: if the server crashes, no accepted work of a client is lost.

``checkpoints/accepted.log`` holds all replies accepted since the last checkpoint. A reply counts as accepted when its
record is on disk (append, fdatasync). After a crash, the server repeats the rounds since that checkpoint: it selects
the same clients, takes the accepted replies from the log and sends new requests for the rest. Where models have several
widths, the log also has what width each device had told when the round was drawn, so that each client gets the slot and
the model that it had. Each checkpoint empties the log.

A record is ``magic, length, CRC-32, bytes``; the bytes are a safetensors file whose header describes the record. The
log ends before the first incomplete or damaged record; the rest is dropped with a warning.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from logging import INFO, WARNING
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from flwr.common.logger import log
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedcross.core.errors import StorageError, remedy
from fedcross.core.private_files import open_own, own_folder
from fedcross.core.strict_json import dumps_exact, loads_exact
from fedcross.server.accounting import sync_folder
from fedcross.strategies.pool.layout import Arrays
from fedcross.strategies.wire.protocol import EXTRA, Round, Trace, Upload

MAGIC = b"FCL2"
_HEAD = struct.Struct("<4sQI")
_MODEL = "model."
#: (round, exchange)
_Place = tuple[int, int]


class WriteAheadLog:
    """The log of one run.

    Parameters
    ----------
    folder : Path
        The run's folder.
    run : str
        The run's identity; a log of another run is ignored.
    after : int
        The round of the checkpoint from which the run continues; a log that follows another checkpoint is ignored.
    """

    def __init__(self, folder: Path, run: str, after: int) -> None:
        self.path = folder / "checkpoints" / "accepted.log"
        self.run = run
        self._available: dict[int, list[int]] = {}
        self._widths: dict[int, dict[int, float]] = {}
        self._accepted: dict[_Place, list[Upload]] = {}
        self._over: set[_Place] = set()
        self._order: list[tuple[int, int, float | None]] = []
        self._after = after
        self._file: BinaryIO | None = None  # opened when the first record is written
        with _DiskErrors(self.path):
            self._good = self._read(after) if self.path.is_file() and not self.path.is_symlink() else 0

    # ---- strategies.round.federation.ReplyLog -------------------------------------------------------------------

    def available(self, number: int) -> list[int] | None:
        """Return the partitions from which round `number` drew its clients; None if the round had not begun."""
        return self._available.get(number)

    def widths(self, number: int) -> dict[int, float] | None:
        """Return partition -> width that its device had told when round `number` was drawn.

        None if the round had not begun, depends on no widths, or was drawn by a version that did not record them (up to
        27 November 2026).
        """
        return self._widths.get(number)

    def draw(self, number: int, available: Sequence[int], widths: Mapping[int, float] | None = None) -> None:
        """Record from which partitions round `number` draws its clients; the first reply syncs it to disk.

        `widths`: partition -> width that its device has told, for a round whose draw depends on them.
        """
        facts = {"kind": "draw", "round": number, "available": _spans(available)}
        if widths is not None:
            facts["widths"] = [
                [width, _spans(sorted(one for one in widths if widths[one] == width))]
                for width in sorted(set(widths.values()))
            ]
        self._append(facts, durable=False)

    def accepted(self, current: Round) -> list[Upload]:
        """Return the uploads accepted in this exchange; each upload is returned once."""
        found = self._accepted.pop((current.number, current.exchange), [])
        if found:
            log(
                INFO, "fedcross: %s replies of round %s are in the log, not requested again", len(found), current.number
            )
        return found

    def accept(self, current: Round, upload: Upload) -> None:
        """Record `upload`; it is on disk when this method returns."""
        facts = {
            "kind": "reply",
            "round": current.number,
            "exchange": current.exchange,
            "client": upload.client,
            "slot": upload.slot,
            "num_examples": upload.num_examples,
            "metrics": dict(upload.metrics),
            "nbytes": upload.nbytes,
            "order": [list(upload.arrays), {group: list(arrays) for group, arrays in upload.extras.items()}],
            **({} if upload.trace is None else {"trace": asdict(upload.trace)}),
        }
        arrays = {_MODEL + name: array for name, array in upload.arrays.items()}
        for group, members in upload.extras.items():
            arrays |= {f"{EXTRA}{group}/{name}": array for name, array in members.items()}
        self._append(facts, arrays)

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

    # ---- the file ---------------------------------------------------------------------------------------------

    def restart(self, after: int) -> None:
        """Empty the log, because the checkpoint of round `after` is on disk."""
        self.close()
        self._after, self._good = after, 0
        self._open()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # on a full disk, an earlier write has already raised the error
                self._file.close()
            self._file = None

    def _open(self) -> BinaryIO:
        """Return the file, positioned after its last complete record; start a new file if needed."""
        if self._file is None:
            with _DiskErrors(self.path):
                own_folder(self.path.parent)
                if self.path.is_symlink():  # not ours: nothing is read or written through it
                    self.path.unlink()
                file: BinaryIO = open_own(self.path, "r+b" if self._good else "wb")  # type: ignore[assignment]
                self._file = file
                file.truncate(self._good)
                file.seek(self._good)
                sync_folder(self.path.parent)
            if not self._good:
                self._append({"kind": "start", "run": self.run, "after": self._after}, durable=False)
        return self._file

    def _append(self, facts: dict[str, Any], arrays: Arrays | None = None, *, durable: bool = True) -> None:
        contiguous = {name: np.asarray(array, order="C") for name, array in (arrays or {}).items()}
        data = save(contiguous, metadata={"facts": dumps_exact(facts)})
        file = self._open()
        with _DiskErrors(self.path):
            file.write(_HEAD.pack(MAGIC, len(data), zlib.crc32(data)))
            file.write(data)
            file.flush()
            if durable:
                os.fdatasync(file.fileno())

    def _read(self, after: int) -> int:
        """Read the log on disk; return the length of its intact part, 0 if it belongs to another run or checkpoint."""
        good = 0
        for facts, arrays, stop in records(self.path):
            if not good and (facts.get("kind"), facts.get("run"), facts.get("after")) != ("start", self.run, after):
                log(WARNING, "%s does not follow the checkpoint of round %s; it is ignored.", self.path, after)
                return 0
            self._take(facts, arrays)
            good = stop
        return good

    def _take(self, facts: dict[str, Any], arrays: Arrays) -> None:
        if facts["kind"] == "draw":
            self._available[facts["round"]] = _numbers(facts["available"])
            if "widths" in facts:
                widths = {one: width for width, spans in facts["widths"] for one in _numbers(spans)}
                self._widths[facts["round"]] = widths
        elif facts["kind"] == "end":
            self._over.add((facts["round"], facts["exchange"]))
            self._order.append((facts["round"], facts["exchange"], facts.get("at")))
        elif facts["kind"] == "reply":
            model, extras = facts["order"]
            self._order.append((facts["round"], facts["exchange"], None))
            upload = Upload(
                client=facts["client"],
                slot=facts["slot"],
                arrays={name: arrays[_MODEL + name] for name in model},
                extras={g: {name: arrays[f"{EXTRA}{g}/{name}"] for name in names} for g, names in extras.items()},
                num_examples=facts["num_examples"],
                metrics=facts["metrics"],
                nbytes=facts["nbytes"],
                trace=Trace(**facts["trace"]) if "trace" in facts else None,
            )
            self._accepted.setdefault((facts["round"], facts["exchange"]), []).append(upload)


class _DiskErrors:
    """Turns an OSError inside the block into a StorageError with advice."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        if isinstance(error, OSError):
            raise StorageError(
                f"{self.path}: the log of accepted replies cannot be written ({error}). What is in it and in the "
                f"checkpoints is safe; {remedy(error)} and continue with resume=RUN, or set checkpoint.log=false."
            ) from error


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
            found = _parsed(data) if data and zlib.crc32(data) == checksum else None
            if found is None:
                log(WARNING, "%s: incomplete or damaged at byte %s of %s; the rest is ignored.", path, start, size)
                return
            yield (*found, stop)
            start = stop


def _parsed(data: bytes) -> tuple[dict[str, Any], Arrays] | None:
    """Return facts and arrays of a record with a valid checksum; None if fedcross did not write it."""
    try:
        length = int.from_bytes(data[:8], "little")
        facts = loads_exact(json.loads(data[8 : 8 + length])["__metadata__"]["facts"])
        return facts, load(data)
    except (SafetensorError, ValueError, KeyError, TypeError):
        return None


def _spans(numbers: Sequence[int]) -> list[list[int]]:
    """Return sorted `numbers` as [first, last] of each contiguous range, which keeps large federations short."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return spans


def _numbers(spans: Sequence[Sequence[int]]) -> list[int]:
    """Return the numbers of which :func:`_spans` has made `spans`."""
    return [number for first, last in spans for number in range(first, last + 1)]
