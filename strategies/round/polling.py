"""Awaiting replies: pauses between two looks at a grid, and replies as they arrive."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

from flwr.app import Message
from flwr.serverapp import Grid

#: Least and largest pause between two polls in seconds, and the share of the time since the last reply that it takes.
PAUSE_S, LONGEST_S, SHARE = 0.002, 2.0, 0.05


@runtime_checkable
class LocalClients(Protocol):
    """Attributes of a grid whose clients run on this machine: whether ``pull_messages`` itself runs them, and node id
    -> partition id. Flower's own grids do not have them.
    """

    blocking: bool
    partitions: dict[int, int]


def pause(last: float, deadline: float) -> None:
    """Sleep between two polls, the longer the longer ago the `last` reply came; not beyond the deadline."""
    now = time.monotonic()
    time.sleep(max(min(LONGEST_S, max(PAUSE_S, SHARE * (now - last)), deadline - now), 0.0))


def forget(grid: Grid, message_ids: Iterable[str]) -> None:
    """Let a grid on this machine drop those of these requests that have no reply; Flower's own grids cannot."""
    if drop := getattr(grid, "forget", None):
        drop(message_ids)


def receive(grid: Grid, message_ids: Iterable[str], timeout_s: float) -> Iterator[Message]:
    """Yield replies to `message_ids` as they arrive, until all have arrived or `timeout_s` seconds have passed."""
    waiting, last = {one for one in message_ids if one}, time.monotonic()
    deadline = last + timeout_s
    while waiting:
        replies = list(grid.pull_messages(set(waiting)))
        for reply in replies:
            waiting.discard(reply.metadata.reply_to_message_id)
            yield reply
        if (now := time.monotonic()) >= deadline or not waiting:
            return
        last = now if replies else last
        if not getattr(grid, "blocking", False):
            pause(last, deadline)
