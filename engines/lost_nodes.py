"""Tells which requests nobody will answer any more: their nodes are not connected.

Flower up to 1.42 answers such a request itself, with the error NODE_UNAVAILABLE; from 1.43 on nothing comes, and the
server would wait until its deadline. So the list of connected nodes is looked at now and then, with every version.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping

#: Seconds between two looks at the list of nodes, and how many looks in a row must miss a node.
LOOK_S, LOOKS = 5.0, 2
#: Requests whose nodes are remembered; the oldest are forgotten first.
MOST = 8192


class LostNodes:
    """The open requests and the nodes that they went to.

    Parameters
    ----------
    nodes : callable
        Returns the ids of the connected nodes.
    clock : callable
        Seconds.
    """

    def __init__(self, nodes: Callable[[], Iterable[int]], clock: Callable[[], float] = time.monotonic) -> None:
        self._nodes, self._clock = nodes, clock
        self._node_of: dict[str, int] = {}
        self._missed: dict[int, int] = {}
        self._last = clock()

    def sent(self, node_of: Mapping[str, int]) -> None:
        """Note requests: message id -> node id."""
        self._node_of.update(node_of)
        for name in list(self._node_of)[: max(0, len(self._node_of) - MOST)]:
            del self._node_of[name]

    def lost(self, waiting: Collection[str]) -> list[str]:
        """Return those of `waiting` whose nodes are gone, each of them once; mostly without a look at the list."""
        now = self._clock()
        if now - self._last < LOOK_S:
            return []
        self._last = now
        there = set(self._nodes())
        asked = {self._node_of[one] for one in waiting if one in self._node_of}
        self._missed = {node: self._missed.get(node, 0) + 1 for node in asked - there}
        gone = {node for node, missed in self._missed.items() if missed >= LOOKS}
        found = [one for one in waiting if self._node_of.get(one) in gone]
        for one in found:
            del self._node_of[one]
        return found
