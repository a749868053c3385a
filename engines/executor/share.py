"""How often a device may call the SuperLink: ask for work, a run's settings and program, answer, say that it is alive.

The gateway counts by address. Many devices may share one, one device may have many, and without containers there may be
no gateway's count at all, so the SuperLink counts by node: each of these calls costs it some milliseconds and a row in
its database. Objects are not counted; a large model has thousands, and :mod:`fair` sees to it that others pass.
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

#: Calls a minute of one node. A SuperNode of ours makes 22 when it is idle (it asks for work every 3 s and beats every
#: 30 s), 300 while messages follow each other (a question every .2 s, ``node.LEAST_S``), and three more for each
#: message. This is twice what the fastest run asks for.
MOST = 1000
#: Calls of one node one after the other without a pause: those of half a minute of a fast run.
BURST = 250
#: A run's program a minute, and one after the other: a device asks once for each run. The answer is large.
FABS, FABS_BURST = 12, 6
#: Calls of keys that the SuperLink does not know, of all of them together: each costs it a signature and a long line.
STRANGERS, STRANGERS_BURST = 60, 30
#: In the place of a node, for such keys.
NOBODY = 0
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
    most, burst : int
        Calls a minute, and one after the other.
    clock : callable
        Tells the time in seconds.
    what : str
        What is counted, for the log.
    """

    def __init__(
        self, most: int = MOST, burst: int = BURST, clock: Callable[[], float] = time.monotonic, what: str = "calls"
    ) -> None:
        self.most, self.burst, self._clock, self.what = most, burst, clock, what
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
            calls = self._calls.setdefault(node, Calls(self.burst, now))
            calls.left = min(self.burst, calls.left + (now - calls.filled) * self.most / 60)
            calls.filled = now
            if calls.left >= 1:
                calls.left -= 1
                return
            calls.refused += 1
            if now - calls.told >= TOLD_S:
                log(
                    WARNING, "fedcross: node %s makes more than %d %s a minute: %d refused since the last line on it",
                    node, self.most, self.what, calls.refused,
                )  # fmt: skip
                calls.told, calls.refused = now, 0
        room = max(1.0, self.burst / 10)  # if it were one call, every second one would be refused here
        raise Later(f"this device makes more than {self.most} {self.what} a minute", room * 60 / self.most)


def node_of(request: Any, state: Any) -> int:
    """Return the node that makes this call; :data:`NOBODY` if Flower does not know its key."""
    if hasattr(request, "node"):
        return int(request.node.node_id)
    if hasattr(request, "public_key"):
        known = state.get_node_id_by_public_key(request.public_key)
        return NOBODY if known is None else int(known)
    return int(request.node_id)


def within(handler: Callable[..., Any], share: Share, strangers: Share) -> Callable[..., Any]:
    """Return Flower's handler of a node's call, which makes only as many as its `share` allows."""

    @functools.wraps(handler)
    def call(request: Any, state: Any, **others: Any) -> Any:
        node = node_of(request, state)
        (strangers if node == NOBODY else share).take(node)
        return handler(request=request, state=state, **others)

    return call
