"""Ctrl-C that cannot be lost: Python drops a KeyboardInterrupt that is raised inside a destructor or a callback.

And SIGTERM that ends a run as Ctrl-C does, so that it says how far it came and takes away what is only for its time.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def watched() -> Iterator[threading.Event]:
    """Yield an event that is set when a SIGINT or SIGTERM comes inside the block; it is handled as before too.

    Only the main thread of a process can watch; elsewhere the event is never set.
    """
    seen = threading.Event()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in handlers.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread():
        before = {}

    def note(number: int, frame: FrameType | None) -> None:
        seen.set()
        before[signal.Signals(number)](number, frame)

    for number in before:
        signal.signal(number, note)
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def asked_to_end() -> Iterator[threading.Event]:
    """Turn the first SIGTERM inside the block into a KeyboardInterrupt; yield an event that it sets.

    A second one ends the process at once. Nothing changes outside the main thread of a process, or where somebody
    has chosen what SIGTERM does.
    """
    asked = threading.Event()
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield asked
        return

    def end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        asked.set()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
