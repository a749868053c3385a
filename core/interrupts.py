"""Ctrl-C that cannot be lost: Python drops a KeyboardInterrupt that is raised inside a destructor or a callback."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def watched() -> Iterator[threading.Event]:
    """Yield an event that is set when a SIGINT comes inside the block; the signal is handled as before too.

    Only the main thread of a process can watch; elsewhere the event is never set.
    """
    seen = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield seen
        return

    def note(number: int, frame: FrameType | None) -> None:
        seen.set()
        before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
