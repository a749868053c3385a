"""Whose call the SuperLink answers next: that of the node which has had least of its time.

The SuperLink answers some fifty calls a second where its processor is shared. Answered in the order in which they come,
the calls of one node that asks without end, from several addresses perhaps, leave the others what is over: their rounds
took up to fourteen times as long. A node alone still gets everything.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .replies import Later, Refusals
from .share import node_of
from .turns import LARGE

#: Calls that are answered at the same time. Python does little more with more threads.
PLACES = 4
#: Calls of one node that are here, waiting ones too. A SuperNode makes two for the objects of a message, one for work
#: and one as its heartbeat. The SuperLink has 40 threads for all.
MOST = 8
#: Seconds until half of the time that a node has had is forgotten.
HALF_S = 10.0
#: Longest wait for a place, in seconds.
QUEUE_S = 30.0
#: Nodes that are remembered; those that have called longest ago are forgotten first.
REMEMBERED = 10_000


@dataclass
class Use:
    """What a node has: seconds `had`, as of `at`, fading; calls `here`, answered or waiting."""

    had: float = 0.0
    at: float = 0.0
    here: int = 0

    def now(self, now: float) -> float:
        """Return the seconds that count at `now`."""
        return self.had * math.exp2((self.at - now) / HALF_S)


@dataclass
class Waiting:
    """A call that waits for a place."""

    node: int
    called: threading.Event


class Fair:
    """Places at the SuperLink.

    Parameters
    ----------
    refused : Refusals
        Is told of calls that are refused.
    places : int
        Calls that are answered at the same time.
    clock : callable
        Tells the time in seconds.
    """

    def __init__(self, refused: Refusals, places: int = PLACES, clock: Callable[[], float] = time.monotonic) -> None:
        self._refused, self._free, self._clock = refused, places, clock
        self._lock = threading.Lock()
        self._uses: dict[int, Use] = {}
        self._queue: list[Waiting] = []

    @contextmanager
    def place(self, node: int, large: bool = False) -> Iterator[None]:
        """Wait for a place, and have it. A `large` object needs none: it waits for its turn at the database.

        Raises
        ------
        Later
            If too many calls of this node are here, or no place is free in :data:`QUEUE_S`.
        """
        self._enter(node)
        try:
            if not large:
                self._take(node)
            began = self._clock()
            try:
                yield
            finally:
                self._leave(node, self._clock() - began, large)
        finally:
            with self._lock:
                self._uses[node].here -= 1

    def _enter(self, node: int) -> None:
        with self._lock:
            if node not in self._uses:
                self._forget()
            use = self._uses.setdefault(node, Use(at=self._clock()))
            if free := use.here < MOST:
                use.here += 1
        if not free:
            self._refused(node, "a call", f"{MOST} of its calls are here already")
            raise Later(f"{MOST} calls of this device are here already")

    def _take(self, node: int) -> None:
        with self._lock:
            if self._free:
                self._free -= 1
                return
            mine = Waiting(node, threading.Event())
            self._queue.append(mine)
        if mine.called.wait(QUEUE_S):
            return
        with self._lock:
            if not mine.called.is_set():  # else the place has come just now
                self._queue.remove(mine)
                raise Later("the SuperLink is busy")

    def _leave(self, node: int, took: float, large: bool) -> None:
        """Count what the call took, and give its place to the node that has had least; the older call of two."""
        with self._lock:
            now, use = self._clock(), self._uses[node]
            use.had, use.at = use.now(now) + took, now
            if large:
                return
            if not self._queue:
                self._free += 1
                return
            first = min(self._queue, key=lambda one: self._uses[one.node].now(now))
            self._queue.remove(first)
            first.called.set()

    def _forget(self) -> None:
        """Make room for a node. Only those without a call here can be forgotten."""
        if len(self._uses) >= REMEMBERED:
            idle = sorted((use.at, node) for node, use in self._uses.items() if not use.here)
            for _, node in idle[: REMEMBERED // 10]:
                del self._uses[node]


def in_place(handler: Callable[..., Any], fair: Fair) -> Callable[..., Any]:
    """Return Flower's handler of a node's call, which waits for its place."""

    @functools.wraps(handler)
    def call(request: Any, state: Any, **others: Any) -> Any:
        with fair.place(node_of(request, state), large=len(getattr(request, "object_content", b"")) >= LARGE):
            return handler(request=request, state=state, **others)

    return call
