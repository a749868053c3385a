"""Forgets what is left of a message that the SuperNode has given up, and answers one that its worker has given up.

Flower's SuperNode works on one message at a time. It stores the message and a task for it, pulls the message's objects
and confirms it; then it waits for a reply, any reply. If the SuperLink refuses one of these calls because the run is
over, Flower (1.41, 1.42) drops neither message nor task: its reply comes while the next message is in work, counts as
the answer to that one, and so on. The device stays one message behind until it is started again. After any other error
Flower drops both, but not a reply that is there already.

So the task of a message that was given up is ended here, which takes its token from the worker; and before the next
message is received, whatever is left of earlier ones is deleted.

The other way round, Flower waits without an end for a reply whose worker has ended the task without one, or has died
while it handed the reply over: the device stays online and never asks for a message again. Here the server gets an
error for it, or, if the reply was announced already, the device goes on with the next message.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from logging import ERROR, INFO, WARNING, LogRecord
from typing import Any

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode, Status, SubStatus
from flwr.common.logger import FLOWER_LOGGER, log

LOOP, RECEIVE, SEND, INSERT = (
    "flwr.supernode.start_client_internal",
    "_pull_and_store_message",
    "_push_messages",
    "_insert_message",
)
#: Most characters of the reason why a task has ended.
LONGEST = 300
#: In Flower's line on a call with a token that opens no task (any more).
TAKEN = "Runtime task-token authentication failed"


@dataclass
class InWork:
    """The message that the SuperNode has received last, and the number of its task."""

    message: Message | None = None
    task: int | None = None


class _Noting:
    """The SuperNode's state, which notes the message that comes and the tasks that are made: numbers and runs."""

    def __init__(self, state: Any, work: InWork) -> None:
        self._state, self._work = state, work
        self.made: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def store_message(self, message: Message) -> str | None:
        """Keep a message."""
        self._work.message = message
        stored: str | None = self._state.store_message(message)
        return stored

    def create_task(self, **told: Any) -> int | None:
        """Make a task."""
        task: int | None = self._state.create_task(**told)
        if task is not None:
            self.made.append((task, told["run_id"]))
            self._work.task = task
        return task


class _Ending:
    """The SuperNode's state and store of objects while it waits for a reply, which see that none will come."""

    def __init__(self, state: Any, store: Any, work: InWork, insert: Callable[..., None]) -> None:
        self._state, self._store, self._work, self._insert = state, store, work, insert

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def _over(self) -> str | None:
        """Return why the task has ended; None while it has not."""
        if self._work.task is None:
            return None
        tasks = self._state.get_tasks(task_ids=[self._work.task])
        if tasks and tasks[0].status.status != Status.FINISHED:
            return None
        return (tasks[0].status.details if tasks else "") or "no reason given"

    def get_messages_legacy(self, **asked: Any) -> Any:
        """Return the replies that are there: an error if the task ended before this look, and there is none."""
        why, message = self._over(), self._work.message
        found = self._state.get_messages_legacy(**asked)
        if found or why is None or message is None:
            return found
        log(ERROR, "fedcross: the worker ended without a reply (%s); the server gets an error", why)
        text = f"The worker ended without a reply ({why[:LONGEST]})."
        self._insert(Message(Error(ErrorCode.CLIENT_APP_CRASHED, text), reply_to=message), self._state, self._store)
        return self._state.get_messages_legacy(**asked)

    def get(self, name: str) -> bytes | None:
        """Return an object of the reply; empty while it has not come.

        Raises
        ------
        LookupError
            If it will not come.
        """
        why = self._over()
        content: bytes | None = self._store.get(name)
        if content == b"" and why is not None:
            raise LookupError(f"the worker ended before all of its reply was here ({why[:LONGEST]})")
        return content


class _Objects:
    """The SuperNode's store of objects with another way to look for one."""

    def __init__(self, store: Any, get: Callable[[str], bytes | None]) -> None:
        self._store, self.get = store, get

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def forgotten(receive: Callable[..., int | None], work: InWork) -> Callable[..., int | None]:
    """Return Flower's function that receives a message, after which nothing is left of one that was given up.

    Parameters
    ----------
    receive : callable
        Flower's; returns the run, None if there was no message or it was given up.
    work : InWork
        Gets the message and its task.
    """
    runs: set[int] = set()

    @functools.wraps(receive)
    def call(state: Any, object_store: Any, **others: Any) -> int | None:
        state.delete_messages()  # those before are answered or given up
        while runs:
            object_store.delete_objects_in_run(runs.pop())
        work.message = work.task = None
        noting = _Noting(state, work)
        run = receive(state=noting, object_store=object_store, **others)
        if run is None:
            for task, its_run in noting.made:
                state.finish_task(task, sub_status=SubStatus.FAILED, details="Its message was given up.")
                runs.add(its_run)
        return run

    return call


def answered(send: Callable[..., None], insert: Callable[..., None], work: InWork) -> Callable[..., None]:
    """Return Flower's function that waits for a reply and sends it, which does not wait for one that will not come.

    Parameters
    ----------
    send : callable
        Flower's.
    insert : callable
        Flower's; stores a message with its objects.
    work : InWork
        What is to be answered.
    """

    @functools.wraps(send)
    def call(state: Any, object_store: Any, **others: Any) -> None:
        ending = _Ending(state, object_store, work, insert)
        send(state=ending, object_store=_Objects(object_store, ending.get), **others)

    return call


def no_error(record: LogRecord) -> bool:
    """Lower the level of Flower's line on a worker that asks once more after its task was ended."""
    if TAKEN in str(record.msg):
        record.levelno, record.levelname = INFO, "INFO"
    return True


def attach() -> None:
    """Have this process's SuperNode forget messages that it gives up; another loop stays, and the log says so."""
    loop = import_module(LOOP)
    if not all(hasattr(loop, name) for name in (RECEIVE, SEND, INSERT)):
        log(WARNING, "fedcross: %s has no way to receive that is known; a stopped run may confuse this device", LOOP)
        return
    work = InWork()
    setattr(loop, RECEIVE, forgotten(getattr(loop, RECEIVE), work))
    setattr(loop, SEND, answered(getattr(loop, SEND), getattr(loop, INSERT), work))
    FLOWER_LOGGER.addFilter(no_error)
