"""Awaiting replies: polls a grid until all replies are there or the time is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

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


@runtime_checkable
class Forgetful(Protocol):
    """A grid that can drop requests, as those on this machine can; Flower's own grids cannot."""

    def forget(self, message_ids: Iterable[str]) -> None:
        """Drop those of these messages that have no reply yet; none will be pulled."""


def forget(grid: Grid, message_ids: Iterable[str]) -> None:
    """Let a grid that can (:class:`Forgetful`) drop those of these requests that have no reply: nobody waits for it."""
    if isinstance(grid, Forgetful):
        grid.forget(message_ids)


def is_blocking(grid: Grid) -> bool:
    """Return whether ``pull_messages`` of `grid` waits by itself and every request has exactly one reply."""
    return isinstance(grid, LocalClients) and grid.blocking


def poll(
    grid: Grid,
    waiting: Callable[[], Mapping[str, Any] | Collection[str]],
    deadline: float,
    pull: Callable[[Grid, Mapping[str, Any]], Iterable[list[Message]]] | None = None,
) -> Iterator[list[Message]]:
    """Yield the replies that each poll of the grid finds (may be none), until none is open or the deadline has passed.

    Parameters
    ----------
    grid : Grid
        Polled again after a pause, which grows while no reply comes; without a pause if the grid waits by itself.
    waiting : callable
        Returns the ids of the messages whose replies are still missing; called before each poll.
    deadline : float
        When to stop, in seconds of ``time.monotonic``; the grid is polled at least once.
    pull : callable, optional
        Pulls replies in place of ``grid.pull_messages``, in one or several parts.
    """
    pause, blocking, last = PAUSE_S, is_blocking(grid), time.monotonic()
    while open_now := waiting():
        replies = False
        if pull is not None and isinstance(open_now, Mapping):
            for part in pull(grid, open_now):
                replies = replies or bool(part)
                yield part
                if part and not waiting():
                    return
            if not replies:
                yield []
        else:
            found = list(grid.pull_messages(set(open_now)))
            replies = bool(found)
            yield found
        now = time.monotonic()
        left, last = deadline - now, now if replies else last
        if left <= 0:
            return
        longest = min(MOST_PAUSE_S, max(LONGEST_PAUSE_S, min(WAIT_SHARE * (now - last), LEFT_SHARE * left)))
        pause = PAUSE_S if replies else min(pause * 2, longest)
        if not blocking and waiting():
            time.sleep(min(pause, left))


def receive(grid: Grid, message_ids: Iterable[str], timeout_s: float) -> Iterator[Message]:
    """Yield replies to `message_ids` as they arrive, until all have arrived or `timeout_s` seconds have passed."""
    waiting = {message_id for message_id in message_ids if message_id}
    for replies in poll(grid, lambda: waiting, time.monotonic() + timeout_s):
        for reply in replies:
            waiting.discard(reply.metadata.reply_to_message_id)
            yield reply
