"""Awaiting replies: pauses between two looks at a grid, and replies as they arrive."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

from flwr.app import Message
from flwr.serverapp import Grid

#: Pause in seconds between two polls for replies: the first one, the longest one while clients are quick, and in a long
#: wait, where it may be this share of the time since the last reply and of the time that is left.
PAUSE_S, LONGEST_PAUSE_S, MOST_PAUSE_S, WAIT_SHARE, LEFT_SHARE = 0.002, 0.2, 2.0, 0.02, 0.1


@runtime_checkable
class LocalClients(Protocol):
    """Attributes of a grid whose clients run on this machine; Flower's own grids do not have them.

    Attributes
    ----------
    blocking : bool
        Whether ``pull_messages`` itself runs the clients, and every request has exactly one reply.
    partitions : dict of int to int
        Node id -> partition id, known without asking the nodes.
    """

    blocking: bool
    partitions: dict[int, int]


class Pauses:
    """Pauses between polls of `grid`, longer while no reply comes; none if the grid waits by itself."""

    def __init__(self, grid: Grid, deadline: float) -> None:
        self.blocking: bool = getattr(grid, "blocking", False)
        self.deadline, self._pause, self._last = deadline, PAUSE_S, time.monotonic()

    def wait(self, replied: bool) -> None:
        """Sleep after a poll that has brought replies or none; not beyond the deadline."""
        now = time.monotonic()
        left, self._last = self.deadline - now, now if replied else self._last
        longest = min(MOST_PAUSE_S, max(LONGEST_PAUSE_S, min(WAIT_SHARE * (now - self._last), LEFT_SHARE * left)))
        self._pause = PAUSE_S if replied else min(self._pause * 2, longest)
        if left > 0 and not self.blocking:
            time.sleep(min(self._pause, left))


def forget(grid: Grid, message_ids: Iterable[str]) -> None:
    """Let a grid on this machine drop those of these requests that have no reply; Flower's own grids cannot."""
    if drop := getattr(grid, "forget", None):
        drop(message_ids)


def receive(grid: Grid, message_ids: Iterable[str], timeout_s: float) -> Iterator[Message]:
    """Yield replies to `message_ids` as they arrive, until all have arrived or `timeout_s` seconds have passed."""
    waiting, deadline = {one for one in message_ids if one}, time.monotonic() + timeout_s
    pauses = Pauses(grid, deadline)
    while waiting:
        replies = list(grid.pull_messages(set(waiting)))
        for reply in replies:
            waiting.discard(reply.metadata.reply_to_message_id)
            yield reply
        if time.monotonic() >= deadline or not waiting:
            return
        pauses.wait(bool(replies))
