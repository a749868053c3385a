"""Deletes from the SuperLink's database in small transactions, beside the requests.

Flower deletes all messages and objects of a run in one transaction, inside the request that sees the run's end (the end
of its log, each list of runs, ``stop``), and a reply of any size in the request that confirms it. SQLite has one lock
for all writers: half a GiB took 13 s, and whoever wrote meanwhile got status 500. Here the request deletes the topmost
object at most. A thread deletes the rest, of runs that are over and of messages that are confirmed, for
:data:`STEP_S` at a time, with a pause of twice as long. What it has to delete stands in the database: after a kill the
next SuperLink goes on with it (what was below a confirmed message, when its run is over).

Then the file gives its space back to the disk, if little is left in it: SQLite's ``VACUUM`` writes what is left anew,
and keeps the database locked meanwhile. (Its ``incremental_vacuum`` looks for each page in the list of all free ones:
a tenth of a millisecond to two for 4 KiB, minutes for half a GiB.) Otherwise the space is used again. While no run is
on, SQLite's log of changes is emptied too.
"""

from __future__ import annotations

import functools
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

from flwr.common.logger import log

from .turns import Turns, in_file

#: Seconds of deleting until the lock is given back, and the most bytes and rows that are deleted until then. A
#: transaction is longer by what its last row takes, an object of 8 MiB at most.
STEP_S, STEP_BYTES, STEP_ROWS = 0.1, 1 << 24, 256
#: Least pause between two transactions, in seconds.
PAUSE_S = 0.02
#: Seconds between two looks for runs that are over.
LOOK_S = 60.0
#: Free bytes of the file from which on they are given back, and most bytes that are left in it: these are written anew,
#: in some tenths of a second.
WORTH, CHEAP = 1 << 26, 1 << 24
#: Bytes of SQLite's log of changes (``-wal``) from which on it is emptied when no run is on.
LONG_LOG = 1 << 20
#: Setting of each connection: SQLite's log of changes does not stay larger than this.
PRAGMAS = (("journal_size_limit", str(1 << 26)),)


class Sweeper:
    """Deletes what nobody needs any more.

    Parameters
    ----------
    clock, sleep : callable
        Tell the time in seconds, and wait.
    turns : Turns, optional
        With whom it takes turns.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        turns: Turns | None = None,
    ) -> None:
        self._clock, self._sleep, self._turns = clock, sleep, turns or Turns(clock, sleep)
        self._woken = threading.Event()
        self._dropped: deque[str] = deque()  # by requests
        self._todo: deque[str] = deque()  # of what was dropped; the rest is the thread's own
        self._run: int | None = None

    def start(self, state: Any) -> None:
        """Begin to delete, now and whenever there is something; `state` is the SuperLink's."""
        threading.Thread(target=self._work, args=(state,), name="fedcross-sweeper", daemon=True).start()

    def wake(self) -> None:
        """Let it look for what is to be deleted."""
        self._woken.set()

    def _work(self, state: Any) -> None:
        while True:
            self._woken.clear()
            try:
                self.sweep(state)
            except Exception as error:  # noqa: BLE001 - a database that is locked, a full disk: the next look
                log(WARNING, "fedcross: could not delete what is over, tried again: %s", str(error).partition("\n")[0])
            self._woken.wait(LOOK_S)

    def sweep(self, state: Any) -> None:
        """Delete all there is to delete, with pauses, and give the space back."""
        began = self._clock()
        while self.step(state):
            self._sleep(max(PAUSE_S, 2 * (self._clock() - began)))
            began = self._clock()
        _give_back(state)
        _shorten(state)

    def drop(self, store: Any, name: str) -> None:
        """Delete the object `name`, unless another one has it, now; what is below it soon."""
        with store._mutation_session() as session:
            freed, _ = _delete(session, name)
        if freed:
            self._dropped.extend(freed)
            self.wake()

    def step(self, state: Any) -> bool:
        """Delete a little in one transaction; return whether there was anything to delete."""
        while self._dropped:
            self._todo.append(self._dropped.popleft())
        if not self._todo and self._run is None and (run := over(state)) is None:
            return False
        elif not self._todo and self._run is None:
            self._run = run
        before, run = self._todo.copy(), None if self._todo else self._run
        try:
            with self._turns.turn(), state.object_store._mutation_session() as session:
                names = self._todo if run is None else _of_run(session, run)
                if names:
                    self._some(session, names)
                elif run is not None and not _rows_of_run(session, run):
                    log(INFO, "fedcross: deleted all messages and objects of run %d", uint64(run))
                    self._run = None
        except BaseException:
            self._todo = before  # the transaction is undone
            raise
        return True

    def _some(self, session: Any, names: deque[str]) -> None:
        """Delete one object at least, and what is below, until the step has taken long enough."""
        rows, nbytes, until = 0, 0, self._clock() + STEP_S
        while names:
            nbytes += _size(session, names[0])
            freed, done = _delete(session, names[0], STEP_ROWS)
            rows += 1 + len(freed)
            names.extend(freed)
            if done:
                names.popleft()
            if rows >= STEP_ROWS or nbytes >= STEP_BYTES or self._clock() >= until:
                return


def uint64(number: int) -> int:
    """Return Flower's id of a run from the database's."""
    return number % (1 << 64)


def over(state: Any) -> int | None:
    """Return a run that is over and has messages or objects left, as the database writes it; None if there is none."""
    from flwr.supercore.state.schema.corestate_models import ObjectPushSession, Task
    from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes, Run
    from flwr.supercore.state.schema.objectstore_models import RunObject
    from sqlalchemy import select

    with state.session() as session:
        for kind in (RunObject, MessageIns, MessageRes, ObjectPushSession):
            left = select(kind.run_id).join(Run, Run.run_id == kind.run_id)
            left = left.join(Task, Task.task_id == Run.primary_task_id).where(Task.finished_at.is_not(None))
            found: int | None = session.scalar(left.limit(1))
            if found is not None:
                return found
    return None


def _of_run(session: Any, run: int) -> deque[str]:
    """Return some objects of the run that no other object has."""
    from flwr.supercore.state.schema.objectstore_models import RunObject, StoredObject
    from sqlalchemy import select

    objects = select(RunObject.object_id).join(StoredObject, StoredObject.object_id == RunObject.object_id)
    return deque(session.scalars(objects.where(RunObject.run_id == run, StoredObject.ref_count == 0).limit(STEP_ROWS)))


def _rows_of_run(session: Any, run: int) -> bool:
    """Delete some rows that are left of the run beside its objects; return whether there were any."""
    from flwr.supercore.state.schema.corestate_models import ObjectPushSession
    from flwr.supercore.state.schema.linkstate_models import MessageIns, MessageRes
    from flwr.supercore.state.schema.objectstore_models import RunObject  # of objects that another run has too
    from sqlalchemy import delete, select

    kinds: tuple[tuple[Any, Any, int], ...] = (
        (MessageIns, MessageIns.message_id, STEP_ROWS),
        (MessageRes, MessageRes.message_id, STEP_ROWS),
        (ObjectPushSession, ObjectPushSession.session_id, 4),  # each with the names of the objects it waits for
        (RunObject, RunObject.object_id, STEP_ROWS),
    )
    for kind, key, most in kinds:
        some = list(session.scalars(select(key).where(kind.run_id == run).limit(most)))
        if some:
            session.execute(delete(kind).where(kind.run_id == run, key.in_(some)))
            return True
    return False


def _size(session: Any, name: str) -> int:
    from flwr.supercore.state.schema.objectstore_models import StoredObject
    from sqlalchemy import func, select

    return session.scalar(select(func.length(StoredObject.content)).where(StoredObject.object_id == name)) or 0


def _delete(session: Any, name: str, most: int | None = None) -> tuple[list[str], bool]:
    """Take up to `most` children from an object that no other one has, and delete it when it has none.

    Returns
    -------
    freed : list of str
        The children that no object has any more.
    done : bool
        Whether the object is gone, or another object has it.
    """
    from flwr.supercore.state.schema.objectstore_models import ObjectChild, StoredObject
    from sqlalchemy import delete, select, update

    own = StoredObject.object_id == name
    if session.scalar(select(StoredObject.ref_count).where(own)) != 0:
        return [], True
    below = list(session.scalars(select(ObjectChild.child_id).where(ObjectChild.parent_id == name).limit(most)))
    freed: list[str] = []
    if below:
        these = StoredObject.object_id.in_(below)
        session.execute(delete(ObjectChild).where(ObjectChild.parent_id == name, ObjectChild.child_id.in_(below)))
        fewer = update(StoredObject).where(these, StoredObject.ref_count > 0)
        session.execute(fewer.values(ref_count=StoredObject.ref_count - 1))
        freed = list(session.scalars(select(StoredObject.object_id).where(these, StoredObject.ref_count == 0)))
    if most is not None and len(below) >= most:
        return freed, False
    session.execute(delete(StoredObject).where(own))
    return freed, True


def _give_back(state: Any) -> bool:
    """Give the free pages of the file back to the disk, if that is worth it and cheap; return whether it was done."""
    from sqlalchemy import text

    with state._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as database:
        names = ("page_count", "freelist_count", "page_size")
        pages, free, size = (database.scalar(text(f"PRAGMA {name}")) for name in names)
        if free * size < WORTH or (pages - free) * size > CHEAP:
            return False
        database.execute(text("VACUUM"))
        database.execute(text("PRAGMA wal_checkpoint"))
    log(INFO, "fedcross: gave %d MiB of the database back to the disk", free * size >> 20)
    return True


def _shorten(state: Any) -> bool:
    """Empty SQLite's log of changes if it is long, no run is on and nobody reads; return whether it was done."""
    from flwr.supercore.state.schema.corestate_models import Task
    from flwr.supercore.state.schema.linkstate_models import Run
    from sqlalchemy import select
    from sqlalchemy.engine import make_url

    path = str(make_url(state.database_url).database)
    with state.session() as session:
        on = select(Run.run_id).join(Task, Task.task_id == Run.primary_task_id).where(Task.finished_at.is_(None))
        going = session.scalar(on.limit(1)) is not None
    if going or Path(f"{path}-wal").stat().st_size < LONG_LOG:
        return False
    with closing(sqlite3.connect(path, timeout=0)) as database:  # no wait for readers with the lock in hand
        database.execute("PRAGMA wal_checkpoint(PASSIVE)")  # nearly all of the work, without the lock
        [busy, *_] = database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy


def attach(sweeper: Sweeper) -> None:
    """Let the SuperLink of this process delete with `sweeper`; a state in memory stays Flower's."""
    from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
    from flwr.supercore import sql_mixin
    from flwr.supercore.object_store import sql_object_store as objects

    states: Any = SqlLinkState
    stores: Any = objects.SqlObjectStore
    connections: Any = sql_mixin
    initialize, cleanup, delete = states.initialize, states.cleanup_run, stores.delete
    inside = objects._objectstore_mutation_lock_held

    @functools.wraps(initialize)
    def initialized(state: Any, *arguments: Any, **named: Any) -> Any:
        found = initialize(state, *arguments, **named)
        if in_file(state):
            sweeper.start(state)
        return found

    @functools.wraps(cleanup)
    def cleaned(state: Any, run_id: int) -> None:
        if in_file(state):
            sweeper.wake()
        else:
            cleanup(state, run_id)

    @functools.wraps(delete)
    def deleted(store: Any, object_id: str) -> None:
        if in_file(store) and not inside.get():
            sweeper.drop(store, object_id)
        else:
            delete(store, object_id)

    connections.SQLITE_PRAGMAS = (*PRAGMAS, *connections.SQLITE_PRAGMAS)
    states.initialize, states.cleanup_run, stores.delete = initialized, cleaned, deleted
