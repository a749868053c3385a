"""Tells whether a device has its link: when the SuperLink last answered it. The health check of a device's container.

::

    python -m fedcross.engines.executor.link 9094        exit code 1, and the reason, without a link

The SuperNode writes the time into a file of its own runtime folder (``XDG_RUNTIME_DIR``), after each answer; it sends a
heartbeat about every 20 s, also while it trains. Where there is no such folder, nothing is written. The time is that of
the system's monotonic clock: setting the clock changes no answer.
"""

from __future__ import annotations

import os
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

#: Seconds without an answer of the SuperLink until a device counts as cut off. The SuperLink lists it as offline after
#: 60 s without a heartbeat.
CUT_OFF_S = 90.0
#: Least seconds between two times that are written.
STEP_S = 1.0
FOLDER = "XDG_RUNTIME_DIR"


def place(port: int) -> Path | None:
    """Return the file for the SuperNode on `port` of this machine; None where there is no runtime folder."""
    folder = os.environ.get(FOLDER)
    return Path(folder) / f"fedcross-link-{port}" if folder and Path(folder).is_dir() else None


class Answers:
    """Writes down when the SuperLink answered.

    Parameters
    ----------
    path : Path or None
        The file, which begins without a time; None writes nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._written = path, -STEP_S
        if path is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def note(self) -> None:
        """Write the time of now; that it cannot be written ends nothing."""
        now = time.monotonic()
        if self._path is None or now - self._written < STEP_S:
            return
        self._written = now
        beside = self._path.with_name(f"{self._path.name}.new")
        with suppress(OSError):  # a full disk: the check tells it
            found = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(found, "w") as file:
                file.write(f"{now:.3f}\n")
            beside.replace(self._path)


def last(path: Path | None) -> float | None:
    """Return the time of the last answer, in seconds of ``time.monotonic``; None if none is known."""
    try:
        return None if path is None else float(path.read_text())
    except (OSError, ValueError):
        return None


def fault(answered: float | None, now: float, most: float = CUT_OFF_S) -> str | None:
    """Return why a device counts as cut off, else None.

    Parameters
    ----------
    answered, now : float
        When the SuperLink answered last (None: never), and the time, in seconds of one clock.
    most : float
        Seconds that may lie between them.
    """
    if answered is None:
        return "the SuperLink has not answered yet"
    if not 0 <= now - answered <= most:  # a time to come is left over from before a restart of the machine
        return f"the SuperLink has not answered for {abs(now - answered):.0f} s"
    return None


def main(arguments: list[str]) -> int:
    """Return 0 if the SuperNode on the port that is named works and has its link; else say why not and return 1."""
    port = int(arguments[0])
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=4):
            why = fault(last(place(port)), time.monotonic())
    except OSError as error:
        why = f"the SuperNode does not answer on port {port} ({error})"
    if why:
        print(why, file=sys.stderr)
    return 1 if why else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
