"""Ctrl-C that is not lost when it comes in a destructor or a callback; SIGTERM that ends a run as Ctrl-C does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], object]


@contextmanager
def watched() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set in the main thread; their handlers are called too."""
    seen = threading.Event()
    before: dict[int, Handler] = {n: h for n in (signal.SIGINT, signal.SIGTERM) if callable(h := signal.getsignal(n))}

    def note(number: int, frame: FrameType | None) -> None:
        seen.set()
        before[number](number, frame)

    with _handling(dict.fromkeys(before, note)):
        yield seen


@contextmanager
def asked_to_end() -> Iterator[threading.Event]:
    """Turn the first SIGTERM inside the block into a KeyboardInterrupt; yield an event that it sets.

    A second one ends the process at once. Nothing changes outside the main thread, or where SIGTERM has a handler.
    """
    asked = threading.Event()

    def end(*_: object) -> None:
        asked.set()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise KeyboardInterrupt

    with _handling({signal.SIGTERM: end} if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else {}):
        yield asked


@contextmanager
def _handling(handlers: dict[int, Handler]) -> Iterator[None]:
    """Install `handlers` inside the block, if this is the main thread."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()} if main else {}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
