"""Large objects go into the SuperLink's database one after the other, so that small requests get in between.

SQLite has one lock for all writers, and no queue: who does not get it asks again, after up to a tenth of a second. An
object of 8 MiB takes tens of milliseconds of processor time under that lock, several times that where the processor is
shared. Sixteen at a time kept it for seconds, heartbeats and signatures (each writes a row) found it taken again and
again, and some ended with status 500. They also held all of the state's connections. Here large objects wait outside
the database, in the order in which they came, and their digests are compared before the lock is taken. Whoever has had
a turn leaves the lock to others for as long again if there is a queue; SQLite copies its log of changes into the file
in that turn as well, without the lock. :mod:`sweep` takes turns with them.
"""

from __future__ import annotations

import copy
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from logging import ERROR
from typing import Any

from flwr.common.logger import log
from flwr.supercore.inflatable.inflatable_object import UnexpectedObjectContentError, get_object_id
from flwr.supercore.inflatable.inflatable_utils import validate_object_content

from .fair import current
from .replies import Later

#: Bytes from which on an object is large. Smaller ones take the lock for a few milliseconds.
LARGE = 1 << 20
#: Longest wait for a turn, and longest pause after one, in seconds.
QUEUE_S, PAUSE_S = 30.0, 0.5


class Turns:
    """Who may keep the database busy: one at a time, in the order of asking.

    Parameters
    ----------
    clock, sleep : callable
        Tell the time in seconds, and wait.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._taken = False
        self._queue: deque[threading.Event] = deque()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn, and have it.

        Raises
        ------
        Later
            If none comes in :data:`QUEUE_S`.
        """
        came = self._clock()
        self._take()
        began = self._clock()
        try:
            yield
        finally:
            done = self._clock()
            if self._queue:
                self._sleep(min(PAUSE_S, done - began))
            self._give()
            if (call := current.get()) is not None:
                call.waited += began - came + self._clock() - done

    def _take(self) -> None:
        with self._lock:
            if not self._taken:
                self._taken = True
                return
            mine = threading.Event()
            self._queue.append(mine)
        if mine.wait(QUEUE_S):
            return
        with self._lock:
            if not mine.is_set():  # else it has come just now
                self._queue.remove(mine)
                raise Later("other large objects are being stored")

    def _give(self) -> None:
        with self._lock:
            if self._queue:
                self._queue.popleft().set()
            else:
                self._taken = False


def in_file(state: Any) -> bool:
    """Return whether Flower keeps this state, or this store of objects, in a file."""
    return hasattr(state, "database_url") and not state._is_in_memory_sqlite


def attach(turns: Turns) -> None:
    """Let the SuperLink of this process store large objects in `turns`; a state in memory stays Flower's."""
    from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
    from flwr.supercore.object_store.sql_object_store import SqlObjectStore

    states: Any = SqlLinkState
    stores: Any = SqlObjectStore
    store_object, put = states.store_object, stores.put
    compared: ContextVar[str | None] = ContextVar("compared", default=None)

    @functools.wraps(store_object)
    def stored(state: Any, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        taken = functools.partial(store_object, state, run_id, session_id, object_id, object_content)
        if len(object_content) < LARGE or not in_file(state):
            return bool(taken())
        if why := _fault(object_id, object_content):
            log(ERROR, "Failed to store object %s: %s", object_id, why)  # as Flower says it
            return False
        before = compared.set(object_id)
        try:
            with turns.turn():
                return bool(taken())
        finally:
            compared.reset(before)

    @functools.wraps(put)
    def put_once(store: Any, object_id: str, object_content: bytes) -> None:
        if compared.get() == object_id:
            store = copy.copy(store)  # the same database; others compare as before
            store.verify = False
        put(store, object_id, object_content)

    states.store_object, stores.put = stored, put_once


def _fault(name: str, content: bytes) -> str | None:
    """Return why the store would refuse the object, None if it takes it."""
    if get_object_id(content) != name:
        return "its content has another digest"
    try:
        validate_object_content(content)
    except UnexpectedObjectContentError as error:
        return str(error)[:200]
    return None
