"""Work for a resident trainer in tests: needs no torch, and does what it is told, however odd."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from flwr.app import ConfigRecord, RecordDict

from fedcross.core.errors import DataError

if log := os.environ.get("ODD_WORK_STARTS"):  # one line per trainer that starts
    with Path(log).open("a") as file:
        file.write(f"{os.getpid()}\n")


def do(task: str, overrides: str, content: RecordDict | None) -> RecordDict:
    """Return the arrays that came, and which process this is; `overrides` says what goes wrong."""
    if content is None:
        Path(overrides).write_text(str(os.getpid()))
        return RecordDict()
    what, _, detail = overrides.partition(" ")
    if what == "once" and not Path(detail).exists():
        Path(detail).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "ours":
        raise DataError("no data here")
    if what == "foreign":
        raise RuntimeError("CUDA error: unspecified launch failure")
    if what == "slow":
        Path(detail).touch()
        time.sleep(600)
    told = ConfigRecord({"pid": os.getpid(), "task": task})
    return RecordDict({"arrays": content.array_records["arrays"], "told": told})
