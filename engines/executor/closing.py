"""Ends the SuperLink's streams of a run's log when it is asked to end.

Such a stream lasts as long as its run, and uvicorn waits for it with the port closed. The run cannot give a sign of
life meanwhile and counts as dead after a minute. Whoever follows it asks the next SuperLink on (:mod:`engines.runs`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

#: Seconds for other calls under way, such as a reply that is being sent: a device sends it again.
GRACE_S = 10
#: Set once this process is asked to end.
ENDING = threading.Event()


def noted(handle_exit: Callable[..., None]) -> Callable[..., None]:
    """Return uvicorn's handler of a signal to end, which also sets :data:`ENDING`."""

    @functools.wraps(handle_exit)
    def call(*arguments: Any) -> None:
        ENDING.set()
        handle_exit(*arguments)

    return call


def while_up(stream: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Return Flower's call that streams what becomes of a run; each stream ends soon after :data:`ENDING` is set."""

    @functools.wraps(stream)
    def call(request: Any, account: Any, state: Any, is_active: Callable[[], bool] | None = None) -> Iterator[Any]:
        return stream(request, account, state, lambda: not ENDING.is_set() and (is_active is None or is_active()))

    return call
