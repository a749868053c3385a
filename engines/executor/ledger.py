"""How much the devices announce and store at the SuperLink, and how much of it is allowed; :mod:`announced` asks.

What is known here is in memory: a SuperLink that starts again knows nothing of the replies before.
"""

from __future__ import annotations

import functools
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import instead
from .replies import Later, Refused, tell

#: Replies of one device that are announced and not complete. A device answers one request at a time; one that lost its
#: connection leaves an unfinished reply behind, which Flower gives up after `GIVEN_UP_S`.
UNFINISHED, GIVEN_UP_S = 4, 180.0
#: A device may announce `BURST` of the largest replies at once, then one in `REFILL_S` seconds; smaller ones more
#: often. An announcement costs at least `LEAST` objects.
BURST, REFILL_S, LEAST = 2, 8.0, 8
#: Seconds that an announcement waits for others; each keeps the database locked.
QUEUE_S = 5.0
#: Bytes that must stay free on the database's disk.
SPARE = 1 << 28


@dataclass
class Reply:
    """A reply that is announced and, as far as known, not deleted."""

    run: int
    missing: set[str]
    touched: float
    stored: int = 0


@dataclass
class Account:
    """What one device has announced: a bucket of objects that refills, and its replies by name."""

    objects: float
    filled: float
    entering: int = 0
    replies: dict[str, Reply] = field(default_factory=dict)
    look_at: int = 32


class Ledger:
    """What the devices have announced and stored.

    Parameters
    ----------
    most : int
        Objects of the largest reply.
    quota : int
        Bytes of a device's replies to one run that may lie at the SuperLink.
    clock, free : callable
        Tell the time in seconds, and the bytes that are free for the objects of a state (None: not known).
    """

    def __init__(
        self,
        most: int,
        quota: int,
        clock: Callable[[], float] = time.monotonic,
        free: Callable[[Any], int | None] = lambda state: free_bytes(state),
    ) -> None:
        self.most, self.quota = most, quota
        self._clock, self._free = clock, free
        self._accounts: dict[int, Account] = {}
        self._lock = threading.Lock()

    def enter(self, node: int, name: str, objects: int, state: Any = None) -> None:
        """Let `node` announce the reply `name`; raise :class:`Later` if it must wait. :meth:`left` must follow.

        With the SuperLink's `state`, replies that it has deleted are forgotten before the device has to wait.
        """
        account = self._accounts.get(node)
        if account is not None and state is not None and self._open(account, name) >= UNFINISHED:
            self._forget(account, state)  # the server may have refused them on their way: then they are deleted
        with self._lock:
            now, full = self._clock(), float(BURST * self.most)
            account = self._accounts.setdefault(node, Account(full, now))
            account.objects = min(full, account.objects + (now - account.filled) * self.most / REFILL_S)
            account.filled = now
            if self._open(account, name) + account.entering >= UNFINISHED:
                raise Later(f"{UNFINISHED} replies of this device are not complete")
            price = max(LEAST, objects)
            if price > account.objects:
                raise Later("this device announces too many objects")
            account.objects -= price
            account.entering += 1

    def left(self, node: int, name: str, run: int, wanted: list[str], state: Any) -> None:
        """Note which objects the SuperLink expects of `node` now (none: it stored no reply, or has all of it)."""
        with self._lock:
            account = self._accounts[node]
            account.entering -= 1
            if wanted:
                known = account.replies.get(name)
                account.replies[name] = Reply(run, set(wanted), self._clock(), known.stored if known else 0)
            look = len(account.replies) >= account.look_at
        if look:
            self._forget(account, state)

    def may_store(self, node: int, name: str, size: int, state: Any) -> None:
        """Raise if `node` may not store the object `name` of `size` bytes (:class:`Refused`, :class:`Later`)."""
        reply = self._reply(node, name)
        if not reply:
            return  # Flower takes only what has been announced
        account, run = self._accounts[node], reply.run
        if self._weight(account, run) + size > self.quota:
            self._forget(account, state)
            if self._weight(account, run) + size > self.quota:
                why = f"more than {self.quota >> 20} MiB of this device's replies to one run (FEDCROSS_REPLY_MIB)"
                raise Refused(413, why, "This object")
        free = self._free(state)
        if free is not None and free - size < SPARE:
            raise Later(f"only {free >> 20} MiB are free on the SuperLink's disk")

    def stored(self, node: int, name: str, size: int) -> None:
        """Note that an object is stored."""
        reply = self._reply(node, name)
        if reply:
            with self._lock:
                reply.missing.discard(name)
                reply.stored += size
                reply.touched = self._clock()

    def waits_for(self, node: int, name: str) -> str | None:
        """Return the name of the node's reply that waits for the object `name`, None if there is none."""
        with self._lock:
            account = self._accounts.get(node)
            replies = account.replies.items() if account else ()
            return next((reply for reply, one in replies if name in one.missing), None)

    def give_up(self, node: int, reply: str) -> None:
        """Forget the reply."""
        with self._lock:
            self._accounts[node].replies.pop(reply, None)

    def _open(self, account: Account, name: str) -> int:
        """Return how many replies besides `name` are announced, not complete and not given up."""
        now = self._clock()
        others = [one for key, one in list(account.replies.items()) if key != name]
        return sum(bool(one.missing) and now - one.touched < GIVEN_UP_S for one in others)

    def _reply(self, node: int, name: str) -> Reply | None:
        with self._lock:
            account = self._accounts.get(node)
            replies = account.replies.values() if account else ()
            return next((one for one in replies if name in one.missing), None)

    def _weight(self, account: Account, run: int) -> int:
        with self._lock:
            return sum(one.stored for one in account.replies.values() if one.run == run)

    def _forget(self, account: Account, state: Any) -> None:
        """Forget the replies that the SuperLink does not have any more."""
        with self._lock:
            names = list(account.replies)
        gone = [name for name in names if name not in state.object_store]
        with self._lock:
            for name in gone:
                account.replies.pop(name, None)
            account.look_at = 32 + 2 * len(account.replies)


def free_bytes(state: Any) -> int | None:
    """Return how many bytes are free for the state's database; None if it is no file.

    Pages of the file that are not in use count where the disk has little room left.
    """
    from sqlalchemy import text
    from sqlalchemy.engine import make_url

    url = make_url(getattr(state, "database_url", "sqlite://"))
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        return None
    free = shutil.disk_usage(str(url.database).rpartition("/")[0] or "/").free
    if free < 2 * SPARE and hasattr(state, "session"):
        with state.session() as session:
            pages, size = (session.scalar(text(f"PRAGMA {name}")) for name in ("freelist_count", "page_size"))
            free += pages * size
    return free


def stored_within(
    push_object: Callable[..., Any], ledger: Ledger, refused: Callable[[int, str, str], None]
) -> Callable[..., Any]:
    """Return Flower's handler of a reply's objects, which refuses what is more than the `ledger` allows.

    A reply with an object too many cannot be completed any more: the server gets an error in its place.
    """

    @functools.wraps(push_object)
    def handler(request: Any, state: Any) -> Any:
        node, name, size = request.node.node_id, request.object_id, len(request.object_content)
        try:
            try:
                ledger.may_store(node, name, size, state)
            except Refused as refusal:
                refused(node, "an object", refusal.why)
                if reply := ledger.waits_for(node, name):
                    tell(instead.replace, state, reply, node, refusal.why)
                    ledger.give_up(node, reply)
                raise
        except Later as later:
            refused(node, "an object for now", later.why)
            raise
        answer = push_object(request=request, state=state)
        if answer.stored:
            ledger.stored(node, name, size)
        return answer

    return handler
