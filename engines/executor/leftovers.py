"""Forgets what is left of a message that the SuperNode has given up.

Flower's SuperNode works on one message at a time. It stores the message and a task for it, pulls the message's objects
and confirms it; then it waits for a reply, any reply. If the SuperLink refuses one of these calls because the run is
over, Flower (1.41, 1.42) drops neither message nor task: its reply comes while the next message is in work, counts as
the answer to that one, and so on. The device stays one message behind until it is started again. After any other error
Flower drops both, but not a reply that is there already.

So the task of a message that was given up is ended here, which takes its token from the worker; and before the next
message is received, whatever is left of earlier ones is deleted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from logging import INFO, WARNING, LogRecord
from typing import Any

from flwr.common.constant import SubStatus
from flwr.common.logger import FLOWER_LOGGER, log

LOOP, RECEIVE = "flwr.supernode.start_client_internal", "_pull_and_store_message"
#: In Flower's line on a call with a token that opens no task (any more).
TAKEN = "Runtime task-token authentication failed"


class _Noting:
    """The SuperNode's state, which notes the tasks that are made: their numbers and runs."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self.made: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def create_task(self, **told: Any) -> int | None:
        """Make a task."""
        task: int | None = self._state.create_task(**told)
        if task is not None:
            self.made.append((task, told["run_id"]))
        return task


def forgotten(receive: Callable[..., int | None]) -> Callable[..., int | None]:
    """Return Flower's function that receives a message, after which nothing is left of one that was given up.

    Parameters
    ----------
    receive : callable
        Flower's; returns the run, None if there was no message or it was given up.
    """
    runs: set[int] = set()

    @functools.wraps(receive)
    def call(state: Any, object_store: Any, **others: Any) -> int | None:
        state.delete_messages()  # those before are answered or given up
        while runs:
            object_store.delete_objects_in_run(runs.pop())
        noting = _Noting(state)
        run = receive(state=noting, object_store=object_store, **others)
        if run is None:
            for task, its_run in noting.made:
                state.finish_task(task, sub_status=SubStatus.FAILED, details="Its message was given up.")
                runs.add(its_run)
        return run

    return call


def no_error(record: LogRecord) -> bool:
    """Lower the level of Flower's line on a worker that asks once more after its task was ended."""
    if TAKEN in str(record.msg):
        record.levelno, record.levelname = INFO, "INFO"
    return True


def attach() -> None:
    """Have this process's SuperNode forget messages that it gives up; another loop stays, and the log says so."""
    loop = import_module(LOOP)
    if not hasattr(loop, RECEIVE):
        log(WARNING, "fedcross: %s has no way to receive that is known; a stopped run may confuse this device", LOOP)
        return
    setattr(loop, RECEIVE, forgotten(getattr(loop, RECEIVE)))
    FLOWER_LOGGER.addFilter(no_error)
