"""The file with what was found: one JSON object, written anew after each line."""

from __future__ import annotations

import faulthandler
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

Found = dict[str, Any]
#: Exit code of a process whose GPU broke, so that another one has to go on.
BROKEN = 3
#: The error of a line that has begun. It stays if the process ends with the line.
BEGUN = "the process ended here"


def read(file: Path) -> Found:
    """Return the content of `file`; empty if there is none."""
    found: Found = json.loads(file.read_text()) if file.exists() else {}
    return found


def write(file: Path, found: Found) -> None:
    """Write `found`; a reader sees the old file or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{file.name}.new")
    beside.write_text(json.dumps(found, indent=1))
    beside.replace(file)


def lines(found: Found, item: str) -> Found:
    """Return the lines of `item` in a report, which has some from now on."""
    own: Found = found.setdefault("items", {}).setdefault(item, {}).setdefault("found", {})
    return own


class Lines:
    """The lines of one item.

    Parameters
    ----------
    file : Path
        The whole report.
    item : str
        Name of the item.
    limit : float, optional
        Seconds after which the process that started this one ends it. Shortly before, a line's stack is printed.
    """

    def __init__(self, file: Path, item: str, limit: float | None = None) -> None:
        self._file, self._item, self._limit = file, item, limit

    def __call__(self, name: str, call: Callable[[], Any]) -> None:
        """Write what `call` returns as line `name`, or its error; nothing if an earlier process wrote that line.

        Raises
        ------
        SystemExit
            With :data:`BROKEN` after what leaves the GPU unusable for this process, or recordings.
        """
        if name in lines(read(self._file), self._item):
            return
        print(f"{self._item}: {name} ...", flush=True)  # what follows in the log belongs to this line
        self._put(name, {"error": BEGUN}, silent=True)
        if self._limit is not None:
            faulthandler.dump_traceback_later(0.9 * self._limit, file=sys.__stderr__ or 2)
        try:
            value = call()
        except Exception as error:  # the error is the finding
            first = (str(error).splitlines() or [""])[0]
            traceback.print_exc()
            self._put(name, {"error": f"{type(error).__name__}: {first}", "traceback": traceback.format_exc()})
            if _breaks(error):
                raise SystemExit(BROKEN) from error
        else:
            self._put(name, value)
            if _recording_failed():
                raise SystemExit(BROKEN)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _put(self, name: str, value: Any, *, silent: bool = False) -> None:
        found = read(self._file)
        lines(found, self._item)[name] = value
        write(self._file, found)
        if not silent:
            shown = value["error"] if isinstance(value, dict) and "error" in value else json.dumps(value)
            print(f"{self._item}: {name}: {shown}", flush=True)


def _breaks(error: Exception) -> bool:
    from fedcross.client.device import breaks_device
    from fedcross.core.errors import DeviceError

    return isinstance(error, DeviceError) or breaks_device(error)


def _recording_failed() -> bool:
    from fedcross.client import cuda_recorder

    return bool(cuda_recorder.failed)
