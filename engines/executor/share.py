"""How often a device may ask the SuperLink for work, for a run's settings, and say that it is alive.

The gateway counts by address. Many devices may share one, and without containers there may be no gateway's count at
all, so the SuperLink counts by node: each of these calls costs it some milliseconds and a row in its database.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from logging import WARNING
from typing import Any

from flwr.common.logger import log

from .replies import Later

#: Calls a minute of one node, and as many at once. A SuperNode of ours makes 22 when it is idle (it asks for work every
#: 3 s and beats every 30 s), 300 while messages follow each other (a question every .2 s, ``node.LEAST_S``), and three
#: more for each message. This is twice what the fastest run asks for.
MOST = 1000
#: Seconds between two lines of the log on one node.
TOLD_S = 60.0
#: Nodes that are remembered; those that have not called for a minute are forgotten first.
REMEMBERED = 10_000


@dataclass
class Calls:
    """How many calls a node may make now, as of `filled`; how many were refused since the log said so, at `told`."""

    left: float
    filled: float
    refused: int = 0
    told: float = float("-inf")


class Share:
    """What each node may ask.

    Parameters
    ----------
    most : int
        Calls a minute.
    clock : callable
        Tells the time in seconds.
    """

    def __init__(self, most: int = MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self.most, self._clock = most, clock
        self._calls: dict[int, Calls] = {}
        self._lock = threading.Lock()

    def take(self, node: int) -> None:
        """Let `node` make a call.

        Raises
        ------
        Later
            If it makes too many; a SuperNode asks again.
        """
        with self._lock:
            now = self._clock()
            if node not in self._calls and len(self._calls) >= REMEMBERED:
                self._calls = {one: calls for one, calls in self._calls.items() if now - calls.filled < TOLD_S}
            calls = self._calls.setdefault(node, Calls(self.most, now))
            calls.left = min(self.most, calls.left + (now - calls.filled) * self.most / 60)
            calls.filled = now
            if calls.left >= 1:
                calls.left -= 1
                return
            calls.refused += 1
            if now - calls.told >= TOLD_S:
                log(
                    WARNING, "fedcross: node %s calls more than %d times a minute: %d calls refused since the last "
                    "line on it", node, self.most, calls.refused,
                )  # fmt: skip
                calls.told, calls.refused = now, 0
        raise Later(f"this device calls more than {self.most} times a minute")


def within(handler: Callable[..., Any], share: Share) -> Callable[..., Any]:
    """Return Flower's handler of a node's small call, which makes only as many as its `share` allows."""

    @functools.wraps(handler)
    def call(request: Any, state: Any, **others: Any) -> Any:
        if hasattr(request, "node"):
            node = request.node.node_id
        elif hasattr(request, "public_key"):
            node = state.get_node_id_by_public_key(request.public_key)
        else:
            node = request.node_id
        if node is not None:
            share.take(node)
        return handler(request=request, state=state, **others)

    return call
