"""The resident trainer: a process beside a SuperNode that keeps torch, data, model and device ready between messages.

:mod:`client.resident.connect` starts it with a listening socket. It answers one message at a time. It ends

- when its keeper (the process that starts the ClientApps) ends,
- when the ClientApp that waits for its answer has ended,
- after an error that fedcross does not define (the device may be in any state),
- after ``FEDCROSS_TRAINER_IDLE`` seconds without a message,
- when it loads a run, or its own modules, for longer than that and than half an hour: it hangs.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import ERROR, INFO
from typing import Any

from flwr.app import RecordDict
from flwr.common.logger import log

from fedcross.client.resident import channel
from fedcross.client.resident import connect as warm
from fedcross.core.errors import DeviceError, FedcrossError, ProtocolError

Work = Callable[[str, str, "RecordDict | None"], RecordDict]
_BACKLOG = 64
_HEAD_SECONDS = 10.0
FAILED = 1


def main(arguments: list[str]) -> int:
    """Answer messages until the process should end; return the exit code."""
    descriptor, name, pid, started, work = arguments
    listener = socket.socket(fileno=int(descriptor))
    listener.set_inheritable(False)
    listener.listen(_BACKLOG)  # once more, so that SO_PEERCRED names this process at the other end
    with warm.runtime_folder() as folder:
        own = _identity(folder, name)
        end_on_signal(lambda: _forget(folder, name, own))
        watch_keeper(warm.Keeper(int(pid), started), lambda: _forget(folder, name, own))
        module, _, function = work.partition(":")
        idle = float(os.environ.get(warm.IDLE, warm.IDLE_SECONDS))
        patience = max(idle, warm.IDLE_SECONDS)
        with at_most(patience):
            do: Work = getattr(importlib.import_module(module), function)
        log(INFO, "fedcross: trainer %s is ready.", os.getpid())
        while True:
            if not warm.wait_for([listener.fileno()], idle):
                # The lock prevents a new trainer. A client that connects meanwhile gets an error and tries again.
                with warm.locked(folder):
                    if not warm.wait_for([listener.fileno()], 0):
                        _forget(folder, name, own)
                        return 0
            connection, _ = listener.accept()
            with connection:
                if channel.same_user(connection) and not answer(connection, do, patience):
                    return FAILED


def answer(connection: socket.socket, do: Work, patience: float = warm.IDLE_SECONDS) -> bool:
    """Answer one message; return False if this process should end. To load a run may take `patience` seconds."""
    try:
        connection.settimeout(_HEAD_SECONDS)  # a client that sends nothing must not block the trainer
        head, content = channel.receive(connection)
        connection.settimeout(None)
        if content is None:
            with at_most(patience):
                return _prepare(do, str(head["overrides"]))
        channel.send(connection, {"pid": os.getpid()})
        with while_connected(connection):
            head, made, sound = _work(do, str(head["task"]), str(head["overrides"]), content)
        channel.send(connection, head, made)
    except (OSError, EOFError, ProtocolError) as error:
        log(ERROR, "fedcross: a message from the ClientApp was lost: %s", error)
        return True
    return sound


def _prepare(do: Work, overrides: str) -> bool:
    try:
        do("prepare", overrides, None)
    except Exception as error:  # noqa: BLE001 - the next message raises the same error and reports it
        log(ERROR, "fedcross: loading the run failed: %s: %s", type(error).__name__, error)
        return isinstance(error, FedcrossError) and not isinstance(error, DeviceError)
    return True


def _work(do: Work, task: str, overrides: str, content: RecordDict) -> tuple[dict[str, Any], RecordDict | None, bool]:
    """Return head and content of the answer, and whether this process can go on."""
    try:
        return {}, do(task, overrides, content), True
    except FedcrossError as error:
        return {"error": type(error).__name__, "text": str(error)}, None, not isinstance(error, DeviceError)
    except Exception as error:  # noqa: BLE001 - sent to the server; after a device error, all later messages would fail
        log(ERROR, "fedcross: the trainer failed and stops.", exc_info=error)
        return {"error": type(error).__name__, "text": str(error)}, None, False


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """End this process if the block takes longer; a ClientApp ends only a trainer that has begun with its message."""

    def end() -> None:
        log(ERROR, "fedcross: loading the run took longer than %.0f s, so the trainer stops.", seconds)
        os._exit(FAILED)

    timer = threading.Timer(min(seconds, warm.LONGEST_SECONDS), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@contextmanager
def while_connected(connection: socket.socket) -> Iterator[None]:
    """End this process if the other side closes `connection` during the block."""
    done, finish = os.pipe()
    watched = os.dup(connection.fileno())

    def follow() -> None:
        if done not in warm.wait_for([watched, done]):
            log(INFO, "fedcross: the ClientApp has ended, so the trainer stops.")
            os._exit(0)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.close(finish)
        thread.join()
        os.close(done)
        os.close(watched)


def watch_keeper(keeper: warm.Keeper, forget: Callable[[], None]) -> None:
    """Call `forget` and end this process when `keeper` ends; at once if it has already ended."""
    try:
        watched = os.pidfd_open(keeper.pid)
    except ProcessLookupError:
        watched = -1

    def end() -> None:
        if watched >= 0 and warm.started(keeper.pid) == keeper.started:
            warm.wait_for([watched])
        forget()
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()


def end_on_signal(forget: Callable[[], None]) -> None:
    """Call `forget` and end this process on SIGTERM, at once; a plain signal handler would wait for the end of a step.

    The signal may reach any thread, also those of an imported library. Whichever thread it reaches, Python's internal
    handler writes the number of the signal to a pipe, and a thread of this process reads it there.
    """
    come, gone = os.pipe()
    os.set_blocking(gone, False)
    signal.signal(signal.SIGTERM, lambda _number, _frame: None)
    signal.set_wakeup_fd(gone)

    def end() -> None:
        while os.read(come, 1)[0] != signal.SIGTERM:
            pass
        forget()
        os._exit(0)

    threading.Thread(target=end, daemon=True).start()


def _identity(folder: int, name: str) -> tuple[int, int] | None:
    try:
        found = os.stat(f"{name}.sock", dir_fd=folder)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _forget(folder: int, name: str, own: tuple[int, int] | None) -> None:
    """Remove this trainer's socket, unless another one has taken the name."""
    if own is not None and _identity(folder, name) == own:
        warm.remove(folder, name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
