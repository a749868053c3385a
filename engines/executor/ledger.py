"""How much the devices announce and store at the SuperLink, and how much of it is allowed.

:mod:`announced` and :mod:`stored` ask. What is known here is in memory: a SuperLink that starts again knows nothing of
the replies before.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .replies import Later, Refused

#: Replies of one device that are announced and not complete. A device answers one request at a time; one that lost its
#: connection leaves an unfinished reply behind, which Flower gives up after `GIVEN_UP_S`.
UNFINISHED, GIVEN_UP_S = 4, 180.0
#: A device may announce `BURST` of the largest replies at once, then one in `REFILL_S` seconds; smaller ones more
#: often. An announcement costs at least `LEAST` objects.
BURST, REFILL_S, LEAST = 2, 8.0, 8
#: Seconds that an announcement waits for others; each keeps the database locked.
QUEUE_S = 5.0
#: Seconds for which nobody else says anything else of an object that a device has announced. The server asks for the
#: reply meanwhile.
HOLD_S = 5.0
#: Objects in dispute that are remembered.
DISPUTES = 4096
#: Bytes that must stay free on the database's disk.
SPARE = 1 << 28

DIFFERENT = "one object is announced with different children"


@dataclass
class Reply:
    """A reply that is announced and, as far as known, not deleted; `claims`: the children of its missing objects."""

    run: int
    missing: set[str]
    touched: float
    stored: int = 0
    since: float = 0.0
    claims: dict[str, frozenset[str]] = field(default_factory=dict)


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
        self._disputed: dict[str, None] = {}  # in the order in which they came up
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

    def left(
        self,
        node: int,
        name: str,
        run: int,
        wanted: list[str],
        state: Any,
        said: Mapping[str, frozenset[str]] | None = None,
    ) -> None:
        """Note which objects the SuperLink expects of `node` now (none: it stored no reply, or has all of it).

        `said` is which children the device has announced of each.
        """
        with self._lock:
            account = self._accounts[node]
            account.entering -= 1
            if wanted:
                known, now = account.replies.get(name), self._clock()
                stored, since = (known.stored, known.since) if known else (0, now)
                own = {one: said[one] for one in wanted} if said else {}
                account.replies[name] = Reply(run, set(wanted), now, stored, since, own)
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
                reply.claims.pop(name, None)
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
            if account := self._accounts.get(node):
                account.replies.pop(reply, None)

    def claim(self, node: int, name: str) -> frozenset[str] | None:
        """Return which children the node has announced of an object that it is to send, None if of none."""
        reply = self._reply(node, name)
        return reply.claims.get(name) if reply else None

    def liars(self, name: str, children: frozenset[str]) -> list[tuple[int, str]]:
        """Return node and name of the unfinished replies that were announced with other `children` of the object."""
        with self._lock:
            return [(node, reply) for node, reply, one in self._claims(name) if one.claims[name] != children]

    def may_claim(self, node: int, name: str, children: frozenset[str]) -> None:
        """Raise if the `node` may not say that the object has these children (:class:`Refused`, :class:`Later`).

        Another device has just said something else (:data:`HOLD_S`), or this one has.
        """
        with self._lock:
            now = self._clock()
            for other, _, reply in self._claims(name):
                if reply.claims[name] == children:
                    continue
                if other == node and now - reply.touched < GIVEN_UP_S:
                    raise Refused(400, DIFFERENT)
                if other != node and now - reply.since < HOLD_S:
                    raise Later("another device has just announced an object of this reply with other children")

    def dispute(self, names: Iterable[str]) -> None:
        """Note that different children were announced of these objects."""
        with self._lock:
            self._disputed.update(dict.fromkeys(names))
            while len(self._disputed) > DISPUTES:
                del self._disputed[next(iter(self._disputed))]

    def disputed(self, name: str) -> bool:
        """Return whether different children were announced of the object."""
        return name in self._disputed

    def agree(self, name: str) -> None:
        """Note that nobody says anything else of the object any more."""
        with self._lock:
            self._disputed.pop(name, None)

    def _claims(self, name: str) -> list[tuple[int, str, Reply]]:
        """Return node, name and reply of all who have announced the object and not sent it."""
        accounts = list(self._accounts.items())
        pairs = ((node, reply, one) for node, account in accounts for reply, one in account.replies.items())
        return [(node, reply, one) for node, reply, one in pairs if name in one.claims]

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
