"""The file with what was found: one JSON object, written anew after each line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

Found = dict[str, Any]
#: Exit code of a process whose GPU broke, so that another one has to go on.
BROKEN = 3


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


class Lines:
    """The lines of one item.

    Parameters
    ----------
    file : Path
        The whole report.
    item : str
        Name of the item.
    """

    def __init__(self, file: Path, item: str) -> None:
        self._file, self._item = file, item

    def __call__(self, name: str, call: Callable[[], Any]) -> None:
        """Write what `call` returns as line `name`, or its error; nothing if an earlier process wrote that line.

        Raises
        ------
        SystemExit
            With :data:`BROKEN` after an error that leaves the GPU unusable for this process.
        """
        if name in self._lines(read(self._file)):
            return
        self._put(name, {"error": "the process ended here"}, silent=True)  # stays if that is what happens
        try:
            value = call()
        except Exception as error:  # the error is the finding
            first = (str(error).splitlines() or [""])[0]
            self._put(name, {"error": f"{type(error).__name__}: {first}"})
            if _breaks(error):
                raise SystemExit(BROKEN) from error
        else:
            self._put(name, value)

    def _lines(self, found: Found) -> Found:
        lines: Found = found.setdefault("items", {}).setdefault(self._item, {}).setdefault("found", {})
        return lines

    def _put(self, name: str, value: Any, *, silent: bool = False) -> None:
        found = read(self._file)
        self._lines(found)[name] = value
        write(self._file, found)
        if not silent:
            print(f"{self._item}: {name}: {json.dumps(value)}", flush=True)


def _breaks(error: Exception) -> bool:
    from fedcross.client.device import breaks_device
    from fedcross.core.errors import DeviceError

    return isinstance(error, DeviceError) or breaks_device(error)


def faults(found: Any, where: str = "") -> list[str]:
    """Return all errors in a part of a report, each with the place `where` it stands."""
    if not isinstance(found, dict):
        return []
    if "error" in found:
        return [f"{where}: {found['error']}"]
    return [fault for name, part in found.items() for fault in faults(part, f"{where} {name}".strip())]
